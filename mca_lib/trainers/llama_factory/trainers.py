"""What is ours of the trainers: the schedule, the log, and what makes the numbers those of the whole step.

Each class comes before one of LLaMA-Factory's in the order of resolution.

    tokens   the loss is divided by the tokens of the step over all ranks (transformers does that)
    pairs    the loss is divided by the pairs of the step over all ranks. LLaMA-Factory takes a mean of micro batches'
             means, in which a pair weighs more where fewer share its micro batch
    padding  transformers gives the embedding of the padding token no gradient, even where it is a token of the text, as
             where padding and end of text are one token. Here nothing with a loss is padding
    losses   TRL 0.28 takes the loss's name as an argument and LLaMA-Factory does not pass it: `hinge` and `ipo` would
             train `sigmoid`
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from mca_lib.data.token_store import IGNORE_INDEX
from mca_lib.trainers.llama_factory import rows
from mca_lib.trainers.llama_factory.record import Record
from mca_lib.trainers.pairs import PairObjective


class StoreTrainer:
    """Comes before one of LLaMA-Factory's trainers."""

    record: Record
    rate: Callable[[int], float]
    """Step → share of the learning rate."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs | {"data_collator": lambda items: items[0]})
        self.model.get_input_embeddings().padding_idx = None
        if not self.record.in_pairs and not self.model_accepts_loss_kwargs:
            raise RuntimeError(
                f"{type(self.model).__name__} takes no num_items_in_batch: its loss would be a mean of means"
            )

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.rate)
        return self.lr_scheduler

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        self.record.fetch()
        batches, count = super().get_batch_samples(*args, **kwargs)
        # A step without any token with loss has the loss 0 of Megatron-Core, not 0 / 0.
        return batches, None if count is None else count.clamp(min=1)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.record.add_loss(loss)
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(self.record.line(logs, self.args) if "grad_norm" in logs else logs, *args, **kwargs)

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Means over the whole evaluation split; transformers would take a mean of micro batches' means."""
        self.model.eval()
        totals: dict[str, float] = {}
        for batch in self.get_eval_dataloader():
            for name, value in self.sums(self._prepare_inputs(batch)).items():
                totals[name] = totals.get(name, 0.0) + float(value)
        values = torch.tensor(list(totals.values()), dtype=torch.float64, device=self.args.device)
        dist.all_reduce(values)
        *sums, count = values.tolist()
        means = self.record.evaluated(dict(zip(totals, sums, strict=False)), count)
        super().log(dict(means))
        return means


class TokenTrainer(StoreTrainer):
    """Pretraining and supervised fine-tuning."""

    def sums(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Of a micro batch: the loss, and at the end the tokens that have one."""
        one = torch.ones((), device=self.args.device)
        return {
            "loss": self.model(**batch, num_items_in_batch=one).loss,
            "count": (batch["labels"] != IGNORE_INDEX).sum(),
        }


class PairTrainer(StoreTrainer):
    """Preference optimization."""

    def dpo_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().dpo_loss(*args, loss_type=self.loss_type, **kwargs)

    def get_batch_loss_metrics(
        self, model: Any, batch: dict[str, torch.Tensor], train_eval: str = "train"
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The micro batch's part of the mean over all pairs of the step. It is divided by the micro batches later."""
        pairs = int(batch[rows.PAIRS])
        loss, means = self._means(model, batch)
        self.record.add_measures({name: pairs * value for name, value in means.items()})
        share = pairs * dist.get_world_size() / self.record.count()
        return loss * share * self.current_gradient_accumulation_steps, {}

    def sums(self, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Of a micro batch: the loss, the measures, and at the end the pairs."""
        pairs = int(batch[rows.PAIRS])
        loss, means = self._means(self.model, batch)
        return {"loss": pairs * loss, **{name: pairs * value for name, value in means.items()}, "count": pairs}

    def _means(self, model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        tensors = {name: tensor for name, tensor in batch.items() if name != rows.PAIRS}
        loss, means = super().get_batch_loss_metrics(model, tensors, "train")
        return loss, {name: means[name] for name in PairObjective.measures}
