"""Names of a transformer's weights in the checkpoint of the hybrid that starts from it.

    decoder.layers.3.self_attention.linear_qkv.weight      of transformer layer 3: in the layer of the fourth `*`
    decoder.layers.3.mlp.linear_fc1.weight                 in the layer of the fourth `-` or `E`
    decoder.final_layernorm.weight                         decoder.final_norm.weight

What stands in no layer keeps its name. Megatron's names: `mca_lib.models.naming` says what they are. No torch.
"""

import re

from mca_lib.models.hybrid.pattern import LayerMap

TRANSFORMER_NORM, HYBRID_NORM = "decoder.final_layernorm.", "decoder.final_norm."

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")


def transformer_name(name: str, layers: LayerMap) -> str | None:
    """Name of a hybrid's tensor in the transformer's checkpoint; None for one of a fresh layer."""
    if name.startswith(HYBRID_NORM):
        return TRANSFORMER_NORM + name.removeprefix(HYBRID_NORM)
    if not (match := _LAYER.match(name)):
        return name
    number = layers.transformer_layer.get(int(match[1]))
    return None if number is None else f"decoder.layers.{number}.{match[2]}"
