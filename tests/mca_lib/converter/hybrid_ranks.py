"""What the ranks of the tests of hybrids run."""

from pathlib import Path
from typing import Any

from tests.mca_lib.converter.export_ranks import make_source
from tests.mca_lib.tiny_models import token_ids

MAMBA = {"head_dim": 16, "state_size": 8, "num_groups": 2}


def make_and_translate(
    directory: Path, variant: str, pattern: str, fresh_layers: str = "random", dtype: str = "float32"
) -> dict[str, Any]:
    """A tiny transformer as `directory`/hf and the job's hybrid of it as `directory`/mca."""
    make_source(directory / "hf", variant, dtype)
    return translate(directory / "hf", directory / "mca", pattern, fresh_layers)


def translate(
    source: Path, target: Path, pattern: str, fresh_layers: str = "random", limit: float | None = 1e-5
) -> dict[str, Any]:
    """The job, in this process."""
    from mca_lib.converter.jobs import translate as job

    spec = {"model": str(source), "output": str(target), "pattern": pattern, "mamba": MAMBA, "seed": 0}
    return job({**spec, "fresh_layers": fresh_layers, "max_logits_difference": limit}, lambda *_, **__: None)


def convert(source: Path, target: Path) -> dict[str, Any]:
    """The job for a model that is what it is, an exported hybrid too."""
    from mca_lib.converter.jobs import convert as job

    return job({"model": str(source), "output": str(target), "max_logits_difference": 1e-4}, lambda *_, **__: None)


def translate_with_swapped_layers(directory: Path) -> None:
    """With names of a hybrid that take each layer's MLP from another layer of the transformer."""
    from mca_lib.models.hybrid.pattern import LayerMap

    true_layers = LayerMap.transformer_layer

    class Swapped(LayerMap):
        @property
        def transformer_layer(self) -> dict[int, int]:  # type: ignore[override]
            found = true_layers.func(self)
            return found | {self.mlp[0]: found[self.mlp[1]], self.mlp[1]: found[self.mlp[0]]}

    from mca_lib.models.config import McaModelConfig

    McaModelConfig.layer_map = property(lambda config: Swapped(config.hybrid.pattern))
    make_and_translate(directory, "llama", "*-*-*-*-")


def move_mamba(checkpoint: Path, target: Path) -> None:
    """Save the hybrid with output projections of its Mamba layers that count, and norms that are not 1."""
    import torch

    from mca_lib.models import AutoModel
    from mca_lib.models.naming import checkpoint_parameters
    from tests.mca_lib.models.factory_ranks import start

    models = AutoModel.from_pretrained(checkpoint, start())
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in checkpoint_parameters(models[0]):
            if name.endswith(".mixer.out_proj.weight"):
                parameter.normal_(0, 0.2)
            elif ".mixer." in name and ("norm" in name or name.endswith(".D")):
                parameter.uniform_(0.5, 1.5)
    models.save_pretrained(target)


def exported_and_difference(checkpoint: Path, target: Path, length: int = 70) -> tuple[float, float]:
    """Export; (largest |Δ| between the logits of Megatron and of the exported code, largest |logit|)."""
    import torch

    from mca_lib.converter.export import export_hf
    from mca_lib.models import AutoModel
    from tests.mca_lib.models.factory_ranks import start

    export_hf(checkpoint, target)
    ids_BS = token_ids(length=length)
    with torch.no_grad():
        hf_BSV = remote_model(target)(ids_BS).logits
        models = AutoModel.from_pretrained(checkpoint, start()).eval()
        positions_BS = torch.arange(length).expand_as(ids_BS)
        mca_BSV = models[0](ids_BS, positions_BS)
    return (hf_BSV - mca_BSV).abs().max().item(), hf_BSV.abs().max().item()


def remote_model(directory: Path, **options: Any) -> Any:
    """The model by the code in its directory, as its users load it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, **options).eval()
