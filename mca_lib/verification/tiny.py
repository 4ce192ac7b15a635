"""A tiny model of every family with every feature of its table on: what the families' cards are measured on."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from mca_lib.errors import ModelError
from mca_lib.verification.tiny_configs import SHAPE, TINY


def tiny_config(model_type: str) -> dict[str, Any]:
    """Fields of the transformers config, a copy: transformers writes into the rope that it is given.

    Raises ModelError for a family that has no row here.
    """
    if model_type not in TINY:
        raise ModelError(f"mca_lib/verification/tiny_configs.py: no tiny config for model type {model_type!r}; add one")
    own = copy.deepcopy(TINY[model_type])
    if "vision_config" in own:
        shared = {name: SHAPE[name] for name in ("tie_word_embeddings",)}
        text = {name: value for name, value in SHAPE.items() if name not in shared} | own["text_config"]
        return {"model_type": model_type, **shared, **own, "text_config": text}
    return {"model_type": model_type, **SHAPE, **own}


def make_tiny(directory: Path, model_type: str, seed: int = 0) -> Path:
    """Write the family's tiny model with a tokenizer that speaks ChatML, as a Hugging Face directory, fp32.

    Every weight counts: biases and norms are not at their neutral initial values.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from mca_lib.tiny_models import make_tokenizer

    values = tiny_config(model_type)
    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if "vision_config" in values else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("bias"):
                tensor.normal_(0, 0.3)
            elif name.endswith("linear_attn.A_log"):
                tensor.uniform_(-4, 1)  # heads that remember a row of tokens, and such that forget at once
            elif name.endswith("sinks"):
                tensor.normal_()
            elif "norm" in name:
                tensor.add_(torch.rand_like(tensor) - 0.5)  # to the 1 or the 0 that is neutral
            elif name.endswith((".D", ".A_log")):
                tensor.uniform_(0.5, 1.5)
    model.to(torch.float32).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    _add_missing(directory)
    return directory


def _add_missing(directory: Path) -> None:
    """Random values for what the family's table has and transformers does not build: multi-token prediction.

    The copies that a source stores beside it are those of the real ones.
    """
    import torch
    from safetensors.torch import load_file, save_file

    from mca_lib.converter.plan import entries
    from mca_lib.converter.stacked import whole
    from mca_lib.models.config import McaModelConfig
    from mca_lib.models.registry import family_of

    config, path = McaModelConfig.from_pretrained(directory), directory / "model.safetensors"
    tensors = load_file(path)
    config = replace(config, source_prefixes=family_of(config.model_type).prefixes_in(tensors))
    missing = {
        name: shape
        for entry in entries(config)
        for name, shape in zip(entry.hf, entry.mapping.hf_shapes(config), strict=True)
        if whole(name) not in tensors
    }
    if missing:
        torch.manual_seed(1)
        tensors |= {name: torch.randn(shape) * SHAPE["initializer_range"] for name, shape in missing.items()}
        copies = family_of(config.model_type).copies_of(config).items()
        tensors |= {name: tensors[of].clone() for name, of in copies if of in tensors and name not in tensors}
        save_file(tensors, path, metadata={"format": "pt"})
