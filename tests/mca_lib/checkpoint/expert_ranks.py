"""What the ranks of the expert checkpoint tests run; each call takes several models, one folder each."""

from pathlib import Path
from typing import Any

from tests.mca_lib.models.factory_ranks import start
from tests.mca_lib.tiny_models import save_hf


def make_sources(directory: Path, variants: list[str], dtype: str) -> None:
    for variant in variants:
        save_hf(directory / variant, variant, dtype)


def save_all(layout: dict[str, Any], sources: Path, variants: list[str], targets: Path) -> None:
    """Load Hugging Face directories at a layout and save them as MCA checkpoints, in the dtype of the sources."""
    from mca_lib.models import AutoModel

    args = start(bf16=True, **layout)
    for variant in variants:
        AutoModel.from_pretrained(sources / variant, args).save_pretrained(targets / variant)


def load_all(layout: dict[str, Any], sources: Path, checkpoints: Path, variants: list[str]) -> dict[str, list[str]]:
    """Variant → names of this rank's tensors whose bytes are the same from either directory.

    Raises AssertionError when one differs.
    """
    import torch

    from mca_lib.models import AutoModel
    from mca_lib.models.naming import checkpoint_parameters

    args, names = start(bf16=True, **layout), {}
    for variant in variants:
        hf, mca = (
            dict(
                pair for model in AutoModel.from_pretrained(d / variant, args) for pair in checkpoint_parameters(model)
            )
            for d in (sources, checkpoints)
        )
        assert hf.keys() == mca.keys()
        for name, tensor in hf.items():
            assert tensor.dtype == mca[name].dtype, name
            assert torch.equal(tensor, mca[name]), name
        names[variant] = list(hf)
    return names


def convert_all(sources: Path, variants: list[str], targets: Path) -> None:
    """Without a model, as the job does."""
    from mca_lib.converter.stream import convert_hf

    for variant in variants:
        convert_hf(sources / variant, targets / variant)


def export_all(checkpoints: Path, variants: list[str], targets: Path) -> None:
    from mca_lib.converter.export import export_hf

    for variant in variants:
        export_hf(checkpoints / variant, targets / variant)


def bias_after_a_cast(directory: Path) -> tuple[str, bool]:
    """(dtype of an expert bias after the model is cast to bf16 for training, is its value the source's)."""
    import torch

    from mca_lib.models import AutoModel

    model = AutoModel.from_pretrained(directory, start(bf16=True))[0]
    router = model.decoder.layers[-1].mlp.router
    before = router.expert_bias.clone()
    model.bfloat16()
    return str(router.expert_bias.dtype), torch.equal(before, router.expert_bias)
