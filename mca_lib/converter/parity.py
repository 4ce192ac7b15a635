"""Does the converted model compute what transformers computes? fp32 logits of both on real text, token by token.

B = 1, S tokens, V vocabulary.
"""

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mca_lib.converter.headers import INDEX_FILE, SINGLE_FILE
from mca_lib.converter.remote_files import admit_own_code
from mca_lib.converter.sample_text import TEXT
from mca_lib.errors import ModelError
from mca_lib.models.config import read_hf_config
from mca_lib.models.families.quantization import is_mxfp4
from mca_lib.models.transformers_class import auto_class
from mca_lib.tokenizer import foreign_id, load_tokenizer

MAX_TOKENS = 512
"""Tokens that a comparison uses, fewer where the model has fewer positions."""


@dataclass(frozen=True)
class LogitsDifference:
    """How far apart two models are."""

    tokens: int
    max_difference: float
    """Largest |Δ| over all tokens and the whole vocabulary."""
    mean_difference: float
    kl_divergence: float
    """Mean over tokens of KL(transformers ‖ Megatron), in nats."""
    top1_agreement: float
    """Share of tokens whose most likely next token is the same."""
    max_logit: float
    """Largest |logit| of transformers: the scale that the differences are to be seen against."""

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def compare_logits(reference_SV: torch.Tensor, logits_SV: torch.Tensor) -> LogitsDifference:
    """Difference of fp32 logits; NaN in either stays NaN."""
    difference_SV = (logits_SV - reference_SV).abs()
    # In float64, some tokens at a time for the room: the rounding of fp32 alone is 1e-8.
    kl_S = torch.cat([_kl(a, b) for a, b in zip(reference_SV.split(64), logits_SV.split(64), strict=True)])
    return LogitsDifference(
        tokens=reference_SV.shape[0],
        max_difference=difference_SV.max().item(),
        mean_difference=difference_SV.mean().item(),
        kl_divergence=kl_S.mean().item(),
        top1_agreement=(reference_SV.argmax(-1) == logits_SV.argmax(-1)).float().mean().item(),
        max_logit=reference_SV.abs().max().item(),
    )


def _kl(reference_SV: torch.Tensor, logits_SV: torch.Tensor) -> torch.Tensor:
    """KL(reference ‖ logits) of every token, [S]."""
    reference_log_SV, log_SV = (t.double().log_softmax(-1) for t in (reference_SV, logits_SV))
    return (reference_log_SV.exp() * (reference_log_SV - log_SV)).sum(-1)


def check_difference(difference: LogitsDifference, limit: float, what: str) -> None:
    """Raises ModelError when the difference exceeds the limit or is not a number."""
    if not difference.max_difference <= limit:  # so that NaN fails too
        raise ModelError(
            f"{what}: fp32 logits differ from transformers by up to {difference.max_difference:.3g} on "
            f"{difference.tokens} tokens, more than checkpoint.max_logits_difference={limit:g}; "
            "the model does something that its config.json does not say"
        )


def hf_logits(directory: str | Path, input_ids_S: Sequence[int]) -> torch.Tensor:
    """transformers' fp32 logits with eager attention, [S, V]; quantized weights as the bf16 that they stand for."""
    admit_own_code(directory)
    hf = read_hf_config(directory)
    quantized = hf.get("quantization_config") is not None
    model = (
        auto_class(directory)
        .from_pretrained(
            directory,
            dtype=torch.bfloat16 if quantized else torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=has_safetensors(directory),
            **_as_bf16(hf),
        )
        .eval()
    )
    model.float()
    with torch.no_grad():
        logits_SV = model(torch.tensor([input_ids_S]), use_cache=False).logits[0].float()
    del model
    gc.collect()
    return logits_SV


def _as_bf16(hf: dict[str, Any]) -> dict[str, Any]:
    """What keeps transformers from computing with MXFP4 itself where it finds a GPU; FP8 it casts with the model."""
    if not is_mxfp4(hf):
        return {}
    from transformers import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def has_safetensors(directory: str | Path) -> bool:
    """Without them the model is a pickle, which the download stage has admitted."""
    return any(Path(directory, name).is_file() for name in (SINGLE_FILE, INDEX_FILE))


def mca_logits(models: Any, input_ids_S: Sequence[int]) -> torch.Tensor:
    """Logits of a model that this one rank holds whole, [S, V]."""
    input_ids_BS = torch.tensor([input_ids_S])
    position_ids_BS = torch.arange(len(input_ids_S))[None]
    models.eval()
    with torch.no_grad():
        return models[0](input_ids_BS, position_ids_BS)[0].float()


def sample_ids(
    directory: str | Path,
    vocab_size: int,
    max_positions: int,
    texts: Sequence[str] = (),
    *,
    skip_further: bool = False,
) -> list[int]:
    """Token ids to compare on: the texts (else the built-in one) by the model's tokenizer.

    A directory without a tokenizer gets ids that run evenly through the vocabulary.

    Args:
        skip_further: leave out tokens that the model has no row for, which are refused otherwise.
    """
    limit = min(MAX_TOKENS, max_positions)
    if not list(Path(directory).glob("tokenizer*")):
        return [(7919 * i + 13) % vocab_size for i in range(min(limit, 128))]
    tokenizer = load_tokenizer(directory)
    ids = [i for text in texts or (TEXT,) for i in tokenizer(text)["input_ids"]][:limit]
    further = [i for i in ids if i >= vocab_size]
    if further and not skip_further:
        raise ModelError(foreign_id(directory, further[0], vocab_size))
    return [i for i in ids if i < vocab_size]
