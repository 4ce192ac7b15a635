"""The jobs `convert` and `export` of `python -m mca_lib.job`.

convert    {"model": HF directory, "output": directory, "max_logits_difference": 1e-3,
            "text_files": [...], "prompts": [...]}    the last two are optional
export     {"checkpoint": MCA directory, "output": directory, "dtype": "auto", "max_shard_size": "5GB"}
"""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mca_lib.converter.export import export_hf
from mca_lib.converter.hf_source import HfSource
from mca_lib.converter.model_converter import ModelConverter, Progress
from mca_lib.converter.parity import check_difference, compare_logits, hf_logits, mca_logits, sample_ids
from mca_lib.converter.plan import Plan
from mca_lib.errors import ModelError
from mca_lib.models.config import McaModelConfig, is_mca_checkpoint


def convert(spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Hugging Face directory → MCA checkpoint, then proof: the written checkpoint, loaded back, against transformers.

    Returns:
        {"digest", "parts", "parameters", "dtype", "tensors", "logits": {"max_difference", "kl_divergence", ...}}

    Raises:
        ModelError: the model is unsupported or inconsistent, or its logits are off.
    """
    model, output = Path(spec["model"]), Path(spec["output"])
    if is_mca_checkpoint(model):
        raise ModelError(f"{model}: already an MCA checkpoint; give the directory of a Hugging Face model")
    config = McaModelConfig.from_pretrained(model)
    with HfSource(model) as source:
        plan = ModelConverter(config).plan(source.tensors)
    config = plan.config(config)
    ids = sample_ids(model, config.vocab_size, config.max_position_embeddings, _texts(spec))
    reference = hf_logits(model, ids)  # before Megatron is here: what transformers computes, untouched

    from mca_lib.checkpoint.digest import checkpoint_digest
    from mca_lib.models import AutoModel
    from mca_lib.parallel import DistributingParallelArguments, destroy_model_parallel, initialize_model_parallel

    initialize_model_parallel(DistributingParallelArguments())
    try:
        parameters = _write(model, output, config, plan, progress)
        difference = compare_logits(reference, mca_logits(AutoModel.from_pretrained(output), ids))
    finally:
        destroy_model_parallel()
    check_difference(difference, spec["max_logits_difference"], str(model))
    return {
        **checkpoint_digest(output),
        "parameters": parameters,
        "dtype": plan.dtype,
        "tensors": len(plan.entries),
        "logits": difference.to_dict(),
    }


def export(spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """MCA checkpoint → Hugging Face directory; see `export_hf`."""
    return export_hf(
        spec["checkpoint"],
        spec["output"],
        dtype=spec.get("dtype", "auto"),
        max_shard_size=spec.get("max_shard_size", "5GB"),
        progress=progress,
    )


def _write(model: Path, output: Path, config: McaModelConfig, plan: Plan, progress: Progress) -> int:
    """Convert and save; the model is released on return. Returns its number of parameters."""
    from mca_lib.models.gpt import McaGPTModel
    from mca_lib.models.model_factory import VirtualModels
    from mca_lib.models.transformer_config import transformer_config

    megatron = transformer_config(
        config, _precision(plan.dtype), use_cpu_initialization=True, perform_initialization=False
    )
    models = VirtualModels(McaGPTModel, config, megatron, source=model)
    with HfSource(model) as source:
        ModelConverter(config).load(models, source, plan, keep_dtype=True, progress=progress)
    models.save_pretrained(output)
    return models.num_parameters()


def _precision(dtype: str) -> SimpleNamespace:
    """Arguments of one rank whose weights have this dtype."""
    from mca_lib.parallel import DistributingParallelArguments

    layout = asdict(DistributingParallelArguments())
    return SimpleNamespace(**layout, bf16=dtype == "bfloat16", fp16=dtype == "float16")


def _texts(spec: dict[str, Any]) -> list[str]:
    files = [Path(f).read_text(encoding="utf-8") for f in spec.get("text_files") or ()]
    return [*files, *(spec.get("prompts") or ())]
