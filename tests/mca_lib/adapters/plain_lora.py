"""LoRA by transformers, PEFT and torch alone: what Megatron's is compared with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.mca_lib.adapters.lora_ranks import LORA, initial_B, lora_config
from tests.mca_lib.trainers.training import HYPERPARAMETERS


class PlainLora:
    """A model of transformers whose linear layers are W + scaling · B·A, by a functional call."""

    def __init__(self, model: str, lora: dict[str, Any], initial: Callable[[str, int, int], Any] | None = None) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from mca_lib.adapters.lora import initial_A
        from mca_lib.adapters.targets import linear_layers, modules, target_names
        from mca_lib.models.config import McaModelConfig

        self.network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self.network.requires_grad_(False)
        settings, config = lora_config(**lora), McaModelConfig.from_pretrained(model)
        names, r = target_names(config, sorted(settings.target_modules)), settings.r
        self.scaling = settings.lora_alpha / (r**0.5 if settings.use_rslora else r)
        self.A, self.B = {}, {}
        for entry in linear_layers(config):
            for name, (outputs, inputs) in zip(modules(entry), entry.mapping.hf_shapes(config), strict=True):
                if name in names:
                    self.A[name] = initial_A(name, r, inputs, HYPERPARAMETERS["seed"]).requires_grad_()
                    B = torch.zeros(outputs, r) if initial is None else initial(name, outputs, r)
                    self.B[name] = B.requires_grad_()

    def parameters(self) -> list[Any]:
        return [*self.A.values(), *self.B.values()]

    def named(self) -> dict[str, Any]:
        """Under PEFT's names."""
        from mca_lib.adapters.peft_files import peft_name

        found = {peft_name(name, "lora_A"): A for name, A in self.A.items()}
        return found | {peft_name(name, "lora_B"): B for name, B in self.B.items()}

    def weights(self) -> dict[str, Any]:
        import torch

        changed = {}
        for name, weight in self.network.named_parameters():
            if name.endswith("experts.gate_up_proj"):
                stem = name.removesuffix("gate_up_proj")
                deltas = [self._gate_up(f"{stem}{expert}") for expert in range(len(weight))]
            elif name.endswith("experts.down_proj"):
                stem = name.removesuffix("down_proj")
                deltas = [self._delta(f"{stem}{e}.down_proj") for e in range(len(weight))]
            elif name.removesuffix(".weight") in self.A:
                changed[name] = weight + self._delta(name.removesuffix(".weight"))
                continue
            else:
                continue
            changed[name] = weight + torch.stack(deltas)
        return changed

    def _gate_up(self, expert: str) -> Any:
        import torch

        return torch.cat([self._delta(f"{expert}.{name}") for name in ("gate_proj", "up_proj")])

    def _delta(self, name: str) -> Any:
        return self.scaling * (self.B[name] @ self.A[name]) if name in self.A else 0.0

    def __call__(self, ids: Any) -> Any:
        """Logits [B, S, V]."""
        import torch

        return torch.func.functional_call(self.network, self.weights(), kwargs={"input_ids": ids}).logits


class Peft:
    """The same by PEFT."""

    def __init__(self, model: str, lora: dict[str, Any]) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        from mca_lib.adapters.lora import initial_A

        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        settings = {**LORA, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **lora}
        self.network = get_peft_model(network, LoraConfig(**settings)).train()
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                if ".lora_A." in name:
                    module = name.removeprefix("base_model.model.").partition(".lora_A")[0]
                    parameter.copy_(initial_A(module, *parameter.shape, HYPERPARAMETERS["seed"]))

    def parameters(self) -> list[Any]:
        return [p for p in self.network.parameters() if p.requires_grad]

    def named(self) -> dict[str, Any]:
        pairs = self.network.named_parameters()
        return {name.replace(".default", ""): p for name, p in pairs if p.requires_grad}

    def __call__(self, ids: Any) -> Any:
        return self.network(input_ids=ids).logits


def row_loss(network: Callable[[Any], Any], rows: Any, indices: Any) -> Any:
    """Mean over the tokens with loss of these rows, one document at a time."""
    import torch

    loss_sum, count = torch.zeros(()), 0
    for index in indices:
        row, begin = rows[index], 0
        for length in row.document_lengths:
            ids = torch.from_numpy(row.input_ids[begin : begin + length])[None]
            labels = torch.from_numpy(row.labels[begin : begin + length])
            loss_sum = loss_sum + torch.nn.functional.cross_entropy(network(ids)[0], labels, reduction="sum")
            count += int((labels != -100).sum())
            begin += int(length)
    return loss_sum / count


def plain_training(kind: str, model: str, store: str, steps: int, lora: dict[str, Any]) -> dict[str, Any]:
    """{"log": (loss, gradient norm) of each step, "adapter": PEFT name → matrix}; `kind` is `peft` or `functional`."""
    import torch
    from transformers import get_scheduler

    from mca_lib.data.token_store import TokenStore
    from mca_lib.trainers.schedule import Schedule

    settings, rows = HYPERPARAMETERS, TokenStore.open(Path(store) / "train")
    schedule = Schedule(len(rows), settings["global_batch_size"], settings["seed"], max_steps=steps)
    network = {"peft": Peft, "functional": PlainLora}[kind](model, lora)
    parameters = network.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=settings["learning_rate"], weight_decay=settings["weight_decay"])
    scheduler = get_scheduler(settings["lr_scheduler_type"], optimizer, settings["warmup_steps"], steps)
    log = []
    for step in range(steps):
        loss = row_loss(network, rows, schedule.rows(step))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, settings["max_grad_norm"])
        optimizer.step()
        scheduler.step()
        log.append((loss.item(), norm.item()))
    return {"log": log, "adapter": {name: p.detach().clone() for name, p in network.named().items()}}


def plain_gradients(model: str, store: str, lora: dict[str, Any]) -> dict[str, Any]:
    """{"loss", "gradients": PEFT name → gradient of the first step} with B as in `adapter_and_gradients`."""
    from mca_lib.data.token_store import TokenStore
    from mca_lib.trainers.schedule import Schedule

    rows = TokenStore.open(Path(store) / "train")
    schedule = Schedule(len(rows), HYPERPARAMETERS["global_batch_size"], HYPERPARAMETERS["seed"], max_steps=1)
    network = PlainLora(model, lora, initial_B)
    loss = row_loss(network, rows, schedule.rows(0))
    loss.backward()
    return {"loss": loss.item(), "gradients": {name: p.grad for name, p in network.named().items()}}
