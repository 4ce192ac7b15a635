"""Phi-3 to Phi-4-mini: the Llama layer with fused projections, LongRoPE, and heads of which a part may rotate.

LongRoPE has other frequencies in long documents, and transformers decides by the longest position of a forward pass.
Here every document of a packed row is decided by its own length, as transformers does where it is alone.
"""

from mca_lib.converter.fused import fused
from mca_lib.converter.mapping import Mapping
from mca_lib.converter.mappings import QKV, GatedMLP
from mca_lib.models.families.base import Family, Field, Neutral
from mca_lib.models.families.dense import DENSE_FIELDS, DENSE_NEUTRAL, DENSE_WEIGHTS, head_size, replaced
from mca_lib.models.families.rope import RopeNames
from mca_lib.models.families.rows import publishers_code
from mca_lib.models.families.window import OneWindow

_HF = "model.layers.{layer}."
_OWN = ("partial_rotary_factor", "auto_map")


def _as_stored(row: Mapping) -> Mapping:
    if isinstance(row, QKV):
        return fused(row, _HF + "self_attn.qkv_proj.weight")
    return fused(row, _HF + "mlp.gate_up_proj.weight") if isinstance(row, GatedMLP) else row


FAMILY = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    fields=replaced(
        DENSE_FIELDS,
        Field("max_position_embeddings", "max_position_embeddings", 4096),
        Field("rms_norm_eps", "norm_epsilon", 1e-5),
        Field("head_dim", "kv_channels", head_size),
        Field("resid_pdrop", "residual_dropout", 0.0),
    ),
    weights=tuple(_as_stored(row) for row in DENSE_WEIGHTS),
    neutral=(
        *(rule for rule in DENSE_NEUTRAL if rule.hf not in _OWN),
        publishers_code("_phi3."),
        Neutral("attention_bias", (False,)),
        Neutral("lm_head_bias", (False,)),
    ),
    rotary_share=1.0,
    # `su` and, of the first releases, `yarn` are other names of it.
    rope_names=RopeNames(dict.fromkeys(("longrope", "su", "yarn"), "longrope"), original_length=4096),
    window=OneWindow(default=None),
)
