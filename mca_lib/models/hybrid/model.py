"""`McaHybridModel`: Megatron-Core's HybridModel (attention, MLP and Mamba-2 layers), built from an `McaModelConfig`.

`McaLanguageModel` says what goes into `forward` and what comes out.
"""

from dataclasses import replace

from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_config import TransformerConfig

from mca_lib.models.config import McaModelConfig
from mca_lib.models.hybrid.pattern import PIPE
from mca_lib.models.hybrid.spec import stack_spec
from mca_lib.models.language_model import McaLanguageModel, model_arguments


class McaHybridModel(McaLanguageModel, HybridModel):
    """One model chunk: all of the model, or the layers of one (virtual) pipeline stage.

    Args:
        mca_config: what the model is; `hybrid` is set.
        config: how this rank runs it; one object shared by all chunks of the rank.
        vp_stage: number of the chunk within the rank, None when there is one.
    """

    def __init__(self, mca_config: McaModelConfig, config: TransformerConfig, *, vp_stage: int | None = None) -> None:
        super().__init__(
            hybrid_stack_spec=stack_spec(mca_config),
            hybrid_layer_pattern=segmented(mca_config.hybrid.pattern, config),
            **model_arguments(mca_config, config, vp_stage),
        )
        if mca_config.hybrid.mamba is not None:
            for layer in self.decoder.layers:
                if isinstance(layer, MambaLayer):  # Megatron's mixer has no argument for it (megatron-core 0.19.2)
                    layer.mixer.norm.eps = mca_config.hybrid.mamba.norm_epsilon
        self._finish_init(mca_config)

    def _packed(self, packed: PackedSeqParams, length: int) -> PackedSeqParams:
        """With the number of the document of each token, which Mamba layers keep apart by it."""
        return replace(super()._packed(packed, length), total_tokens=length)


def segmented(pattern: str, config: TransformerConfig) -> str:
    """The pattern with `|` between the chunks of the layout, in the order of the model."""
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        return pattern
    # The stages of a rank are its chunks; in the model's order chunk 0 of every rank comes first.
    chunks = [chunk for stage in zip(*layout.layout, strict=True) for chunk in stage]
    sizes = [chunk.count(LayerType.decoder) for chunk in chunks]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return PIPE.join(pattern[start : start + size] for start, size in zip(starts, sizes, strict=True))
