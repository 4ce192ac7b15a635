"""What the ranks of the size tests run."""

from typing import Any

from tests.mca_lib.tiny_models import VARIANTS, hf_config


def variants_at(sizes: dict[str, Any]) -> list[str]:
    """Variants that the layout fits."""
    from mca_lib.errors import ConfigError
    from mca_lib.models.layout import Layout
    from mca_lib.models.layout_rules import check_config_layout
    from mca_lib.models.registry import config_from_hf

    fitting = []
    for variant in VARIANTS:
        try:
            check_config_layout(config_from_hf(hf_config(variant).to_dict()), Layout(**sizes))
        except ConfigError:
            continue
        fitting.append(variant)
    return fitting


def held(sizes: dict[str, Any], variants: list[str]) -> dict[str, tuple[tuple[int, int, int], int]]:
    """Variant → (pipeline, tensor, expert tensor rank) and the parameters that this rank's model has."""
    from megatron.core import parallel_state

    from mca_lib.models import AutoModel
    from mca_lib.models.naming import checkpoint_parameters
    from mca_lib.models.registry import config_from_hf
    from mca_lib.parallel import initialize_model_parallel
    from tests.mca_lib.models.layouts import layout_args

    args = layout_args(**sizes)
    initialize_model_parallel(args)
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )
    counts = {}
    for variant in variants:
        models = AutoModel.from_config(config_from_hf(hf_config(variant).to_dict()), args)
        # By checkpoint: the experts' biases are no parameters to torch.
        counts[variant] = (place, sum(t.numel() for model in models for _, t in checkpoint_parameters(model)))
    return counts
