"""Which quantized checkpoints can be read: FP8 with one scale per block (DeepSeek-V3, MiniMax M2), and GPT-OSS's MXFP4.

Others are named.
"""

from typing import Any

from mca_lib.errors import ModelError

# What decides the values of the weights, or brings tensors of its own; an absent key has its first value.
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),
    "expert_dtype": ("fp8",),
}
_MXFP4, WITH_MXFP4 = "mxfp4", ("gpt_oss",)
"""Which tensors have it, and how they lie, is the model type's own."""
# Which tensors are quantized and how their scales are stored: their dtypes tell, and are checked.
_BY_DTYPE = {"modules_to_not_convert", "modules_to_convert", "ignored_layers", "scale_fmt", "dequantize"}


def is_mxfp4(hf: dict[str, Any]) -> bool:
    """Are the experts stored in MXFP4?"""
    quantization = hf.get("quantization_config")
    return (
        isinstance(quantization, dict)
        and quantization.get("quant_method") == _MXFP4
        and hf.get("model_type") in WITH_MXFP4
    )


def block_size(hf: dict[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks of FP8 that have a scale each; None: the model has none.

    Raises:
        ModelError: any other quantization than that and MXFP4, by its name.
    """
    quantization = hf.get("quantization_config")
    if quantization is None:
        return None
    if is_mxfp4(hf):
        for key, value in quantization.items():
            if key not in {*_BY_DTYPE, "quant_method"}:
                raise _unsupported(f"{key}={value!r:.80}", _MXFP4)
        return None
    if not isinstance(quantization, dict):
        raise _unsupported(f"{quantization!r:.80}", None)
    method = quantization.get("quant_method")
    if method not in _ACCEPTED["quant_method"]:
        raise _unsupported(f"quant_method={method!r}", None)
    for key, value in quantization.items():
        if key not in {*_BY_DTYPE, "weight_block_size"} and value not in _ACCEPTED.get(key, ()):
            raise _unsupported(f"{key}={value!r:.80}", method)
    block = quantization.get("weight_block_size")
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise _unsupported(f"weight_block_size={block!r:.80}", method)
    return block[0], block[1]


def _unsupported(what: str, method: str | None) -> ModelError:
    of = f" of quant_method={method!r}" if method else ""
    return ModelError(
        f"config.json: quantization_config: {what}{of} is not supported; only fp8 (e4m3 with a float32 scale per block "
        "of weight_block_size) is dequantized, and mxfp4 of gpt_oss; use the unquantized model"
    )
