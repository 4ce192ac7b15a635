"""The jobs `convert`, `translate` and `export` of `python -m mca_lib.job`.

convert    {"model": HF directory, "output": directory, "max_logits_difference": 1e-3,
            "text_files": [...], "prompts": [...],    both optional; null for the third: logits unchecked
            "resize_vocabulary": false}               true: rows for the tokenizer's further tokens (see `vocabulary`)
translate  as `convert`, and {"pattern": "M*-*-", "mamba": sizes (see `models.hybrid.sizes`), or null,
            "fresh_layers": "random" or "zero_output", "seed": 0}
export     {"checkpoint": MCA directory, "output": directory, "dtype": "auto", "max_shard_size": "5GB",
            "adapter": PEFT directory, "base": digest of the checkpoint's weights,    all three optional: trained on it
            "lora": "both"}                           what is written: "merged", "adapter", or both, then in adapter/
"""

from collections.abc import Iterable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from mca_lib.adapters.peft_files import Adapter, copy_adapter
from mca_lib.checkpoint.publish import published
from mca_lib.checkpoint.side_files import copy_tokenizer
from mca_lib.converter.export import export_hf
from mca_lib.converter.hf_source import HfSource
from mca_lib.converter.model_converter import ModelConverter, Progress
from mca_lib.converter.parity import (
    LogitsDifference,
    check_difference,
    compare_logits,
    hf_logits,
    mca_logits,
    sample_ids,
)
from mca_lib.converter.plan import Plan, entries
from mca_lib.converter.stream import convert_hf
from mca_lib.converter.translation import Translation
from mca_lib.converter.unchanged import Stamps
from mca_lib.errors import ModelError, ResourceError
from mca_lib.memory import available_memory
from mca_lib.models.config import McaModelConfig, is_mca_checkpoint
from mca_lib.models.hybrid.pattern import LayerMap, model_pattern
from mca_lib.models.hybrid.sizes import hybrid_layers
from mca_lib.models.naming import checkpoint_parameters
from mca_lib.models.vocabulary import extra_rows
from mca_lib.tokenizer import load_tokenizer, tokenizer_size

_PATTERN = "checkpoint.pattern"
"""The pattern's name in a recipe."""


def convert(spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Hugging Face directory → MCA checkpoint, then proof: the written checkpoint, loaded back, against transformers.

    Returns:
        what `convert_hf` returns, and "logits": {"max_difference", "kl_divergence", ...}, null when not checked

    Raises:
        ModelError: the model is unsupported or inconsistent, or its logits are off.
        ResourceError: the logits are to be checked and the model does not fit into memory.
    """
    return _convert(spec, progress, None)


def translate(spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Hugging Face directory of a transformer → MCA checkpoint of a hybrid, then proof, as `convert`.

    The logits are those of the hybrid with the output projections of its fresh layers set to zero, which it then has
    in common with the transformer.

    Returns:
        what `convert` returns, and "fresh_layers": their numbers in the pattern, from 0

    Raises:
        ConfigError: the transformer cannot become such a hybrid.
        ModelError, ResourceError: as `convert`.
    """
    pattern = model_pattern(spec["pattern"], _PATTERN)
    hidden = McaModelConfig.from_pretrained(spec["model"]).hidden_size
    layers = hybrid_layers(pattern, hidden, spec.get("mamba") or {}, "checkpoint.mamba.")
    result = _convert(spec, progress, Translation(layers, spec["fresh_layers"], spec["seed"], _PATTERN))
    return {**result, "fresh_layers": list(LayerMap(pattern).fresh)}


def _convert(spec: dict[str, Any], progress: Progress, translation: Translation | None) -> dict[str, Any]:
    model, output, limit = Path(spec["model"]), Path(spec["output"]), spec["max_logits_difference"]
    if is_mca_checkpoint(model):
        raise ModelError(f"{model}: already an MCA checkpoint; give the directory of a Hugging Face model")
    stamps = Stamps.of(model)
    config = McaModelConfig.from_pretrained(model)
    if translation is not None:
        config = translation.config(config)
    options = {"stamps": stamps, "translation": translation, "progress": _writing(progress)}
    with HfSource(model) as source:
        plan = ModelConverter(config).plan(source.tensors)
        size = tokenizer_size(load_tokenizer(model)) if spec.get("resize_vocabulary") else 0
        rows = extra_rows(source, config, size)
        if limit is None:
            return {**convert_hf(model, output, read_back=True, extra_rows=rows, **options), "logits": None}
        _check_memory(model, config)
    ids = sample_ids(
        model, config.vocab_size, config.max_position_embeddings, _texts(spec), skip_further=size > config.vocab_size
    )
    progress(0, len(plan.entries), doing="computing the logits of transformers")
    reference_SV = hf_logits(model, ids)  # before Megatron is here: what transformers computes, untouched

    def check(folder: Path, plan: Plan) -> dict[str, Any]:
        progress(len(plan.entries), len(plan.entries), doing="loading what was written, comparing its logits")
        difference = _compare(folder, plan, ids, reference_SV, silent=translation is not None)
        check_difference(difference, limit, str(model))
        return {"logits": difference.to_dict()}

    return convert_hf(model, output, check=check, extra_rows=rows, **options)


def export(spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """MCA checkpoint → Hugging Face directory; see `export_hf`. With an adapter: merged, as PEFT has it, or both."""
    checkpoint, output, lora = Path(spec["checkpoint"]), Path(spec["output"]), spec.get("lora", "both")
    adapter = None
    if spec.get("adapter") is not None:
        adapter = Adapter(spec["adapter"], McaModelConfig.from_pretrained(checkpoint), spec.get("base"))
        if lora == "adapter":
            with published(output) as folder:
                files = [*copy_adapter(adapter.directory, folder), *copy_tokenizer(checkpoint, folder)]
            return {"parameters": sum(t.numel() for t in adapter.tensors.values()), "files": sorted(files)}
    result = export_hf(
        checkpoint,
        output,
        dtype=spec.get("dtype", "auto"),
        max_shard_size=spec.get("max_shard_size", "5GB"),
        adapter=adapter,
        progress=_writing(progress),
    )
    if adapter is not None and lora == "both":
        result["files"] += [f"adapter/{name}" for name in copy_adapter(adapter.directory, output / "adapter")]
    return result


def _writing(progress: Progress) -> Progress:
    """Says what the tensors are counted for."""
    return partial(progress, doing="writing and checking tensors")


def _check_memory(model: Path, config: McaModelConfig) -> None:
    """The comparison holds the model in fp32, and once more while it is read."""
    elements = sum(prod(e.mapping.local_shape(config, 0, 1)) for e in entries(config))
    needed, available = 2 * 4 * elements, available_memory()
    if needed > available:
        raise ResourceError(
            f"{model}: comparing the logits takes {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are "
            "available; run on a larger machine, or set checkpoint.max_logits_difference: null to convert unchecked"
        )


def _compare(folder: Path, plan: Plan, ids: list[int], reference_SV: Any, *, silent: bool) -> LogitsDifference:
    """Load the checkpoint as a training run does, in one rank, and compare; `silent`: its Mamba layers add nothing."""
    from mca_lib.checkpoint.model import load_model
    from mca_lib.checkpoint.verify import WEIGHTS_FOLDER
    from mca_lib.models.auto import class_of
    from mca_lib.models.model_factory import VirtualModels
    from mca_lib.models.transformer_config import transformer_config
    from mca_lib.parallel import DistributingParallelArguments, destroy_model_parallel, initialize_model_parallel

    config = McaModelConfig.from_pretrained(folder)
    initialize_model_parallel(DistributingParallelArguments())
    try:
        models = VirtualModels(class_of(config), config, transformer_config(config, perform_initialization=False))
        ModelConverter(config).check_targets(models.models, plan)
        load_model(models.models, folder / WEIGHTS_FOLDER)
        if silent:
            silence_fresh_layers(models.models)
        # Tokens that the source lacks have logits of their own, which change none of the others.
        return compare_logits(reference_SV, mca_logits(models, ids)[:, : reference_SV.shape[1]])
    finally:
        destroy_model_parallel()


def silence_fresh_layers(models: Iterable[Any]) -> None:
    """Set the output projections of Mamba layers to zero, so that these leave the residual stream as it is."""
    for model in models:
        for name, parameter in checkpoint_parameters(model):
            if name.endswith(".mixer.out_proj.weight"):
                parameter.data.zero_()


def _texts(spec: dict[str, Any]) -> list[str]:
    files = [Path(f).read_text(encoding="utf-8") for f in spec.get("text_files") or ()]
    return [*files, *(spec.get("prompts") or ())]
