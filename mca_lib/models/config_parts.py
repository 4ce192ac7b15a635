"""Parts of `McaModelConfig`: rope scalings, latent attention, experts. No torch."""

from dataclasses import dataclass
from typing import Literal

from mca_lib.errors import ModelError
from mca_lib.models.hybrid.pattern import MAMBA


def check_sizes(config: object, *names: str) -> None:
    """Raises ModelError for a field of these that is not a positive integer."""
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or value < 1:
            raise ModelError(f"model config: {name} must be a positive integer, found {value!r}")


@dataclass(frozen=True)
class LinearRope:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3's frequency-dependent rope scaling; every factor is the source's own, none has a default."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN (https://arxiv.org/abs/2309.00071): low frequencies interpolated, high ones kept, logits sharpened."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Factor of cos and sin; None follows from `factor` and the two below."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """Round the bounds of the blended range to whole channels."""


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (https://arxiv.org/abs/2402.13753): a factor for every frequency, and others in long documents."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    """Of documents with more than `original_max_position_embeddings` tokens."""
    original_max_position_embeddings: int
    factor: float
    """How many times longer the context is than before."""
    attention_factor: float | None = None
    """Factor of cos and sin, in long documents and short ones; None follows from the two above."""

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


RopeScaling = LinearRope | Llama3Rope | YarnRope | LongRope
ROPE_TYPES: dict[str, type[RopeScaling]] = {
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
    "longrope": LongRope,
}
"""Hugging Face's `rope_type` → class."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434): queries and keys/values from low-rank latents."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    """Channels of a query or key head without position."""
    qk_rope_head_dim: int
    """Channels that rotate; those of the key are shared by all heads."""
    v_head_dim: int
    q_lora_rank: int | None = None
    """None: queries are projected directly."""
    norm_epsilon: float = 1e-6
    """Of the norms of the latents, whatever that of the layers is."""

    def __post_init__(self) -> None:
        check_sizes(self, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if self.qk_rope_head_dim % 2:
            raise ModelError(f"model config: qk_rope_head_dim={self.qk_rope_head_dim} is odd; channels rotate in pairs")
        if self.v_head_dim > self.qk_head_dim:  # Megatron pads values to the size of keys in packed rows
            raise ModelError(
                f"model config: v_head_dim={self.v_head_dim} is larger than qk_nope_head_dim + qk_rope_head_dim = "
                f"{self.qk_head_dim}, which is not supported"
            )

    @property
    def qk_head_dim(self) -> int:
        """Channels of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_down_size(self) -> int:
        """Rows of the projection to the latent of keys and values, and to the channels of the key that rotate."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def has_q_lora(self) -> bool:
        return self.q_lora_rank is not None

    @property
    def direct_q(self) -> bool:
        return self.q_lora_rank is None


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP of some layers."""

    num_experts: int
    topk: int
    """Experts that a token goes to."""
    ffn_hidden_size: int
    """Of one expert."""
    layers: tuple[int, ...]
    """Layers that have experts, counted from 0; the others have a dense MLP."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    normalize_topk: bool = True
    """The weights of the chosen experts sum to 1 (before `scaling_factor`)."""
    scaling_factor: float = 1.0
    num_groups: int | None = None
    """Experts form groups, of which `group_topk` are eligible for a token."""
    group_topk: int | None = None
    expert_bias: bool = False
    """A bias per expert that takes part in the choice alone (https://arxiv.org/abs/2408.15664)."""
    bias: bool = False
    """The router and the projections of the experts have biases."""
    shared_ffn_hidden_size: int | None = None
    """Of the expert that every token goes to; None: there is none."""
    shared_gate: bool = False
    """The shared expert's output is scaled by a sigmoid gate."""
    aux_loss_coeff: float = 0.0
    """Weight of the load balancing loss in training."""

    def __post_init__(self) -> None:
        check_sizes(self, "num_experts", "topk", "ffn_hidden_size")
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.topk > self.num_experts:
            raise ModelError(f"model config: {self.topk} experts per token of {self.num_experts} experts")
        if self.topk == 1 and self.normalize_topk:
            # No gradient would reach the router: Megatron refuses it with softmax, and with sigmoid does not normalize.
            raise ModelError(
                "model config: with one expert per token its normalized weight is always 1, which Megatron does not "
                "compute; use topk (num_experts_per_tok) of 2 or more"
            )
        if not self.layers:
            raise ModelError("model config: no layer has experts; use a dense model type")
        if self.scaling_factor <= 0:  # Megatron takes 0 for none
            raise ModelError(f"model config: scaling_factor={self.scaling_factor} must be greater than 0")
        if self.num_groups is not None:
            self._check_groups(self.num_groups, self.group_topk)

    def _check_groups(self, groups: int, eligible: int | None) -> None:
        """Groups are rated by the sum of their two best experts (https://arxiv.org/abs/2412.19437, 2.1.2)."""
        check_sizes(self, "num_groups", "group_topk")
        size = self.num_experts // groups
        if self.num_experts % groups or size < 2:
            raise ModelError(
                f"model config: {self.num_experts} experts do not divide into num_groups={groups} (n_group) groups of "
                "2 or more"
            )
        if eligible > groups or self.topk > eligible * size:
            raise ModelError(
                f"model config: {self.topk} experts per token from group_topk={eligible} (topk_group) of {groups} "
                f"groups of {size}: there are not so many"
            )
        if eligible < groups and self.topk // eligible != 2:
            raise ModelError(
                f"model config: {self.topk} experts per token from group_topk={eligible} (topk_group) of {groups} "
                f"groups is not supported: Megatron would rate a group by its {self.topk // eligible} best experts, "
                "and it must be by 2"
            )

    @property
    def has_shared(self) -> bool:
        return self.shared_ffn_hidden_size is not None


@dataclass(frozen=True)
class GatedDeltaNet:
    """Linear attention by a gated delta rule (https://arxiv.org/abs/2412.06464), in the place of some attentions."""

    layers: tuple[int, ...]
    """Layers that have it, counted from 0; the others have softmax attention."""
    num_key_heads: int
    num_value_heads: int
    """Consecutive value heads share a key head, which is a query head too."""
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int = 4
    """Tokens over which queries, keys and values are convolved."""

    def __post_init__(self) -> None:
        check_sizes(self, "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel")
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.num_value_heads % self.num_key_heads:
            raise ModelError(
                f"model config: gated_delta_net: {self.num_value_heads} value heads (linear_num_value_heads) do not "
                f"divide among {self.num_key_heads} key heads (linear_num_key_heads)"
            )

    @property
    def key_size(self) -> int:
        """Rows of the query projection, and of the key projection."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Rows of the value projection, and of the gate's."""
        return self.num_value_heads * self.value_head_dim

    @property
    def input_rows(self) -> int:
        """Rows of all projections of the input: query, key, value, gate, and two numbers for each value head."""
        return 2 * (self.key_size + self.value_size + self.num_value_heads)


@dataclass(frozen=True)
class Mamba2:
    """Sizes of the Mamba-2 layers of a hybrid (https://arxiv.org/abs/2405.21060)."""

    num_heads: int
    head_dim: int
    """Channels of a head; inner size = num_heads x head_dim."""
    state_size: int = 128
    num_groups: int = 1
    """Groups of heads that share B and C."""
    conv_kernel: int = 4
    chunk_size: int = 128
    """Tokens that a kernel takes at once; the result does not depend on it."""
    norm_epsilon: float = 1e-5
    """Of the gated norm."""

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "head_dim", "state_size", "num_groups", "conv_kernel", "chunk_size")
        if not self.norm_epsilon > 0:
            raise ModelError(f"model config: hybrid: mamba: norm_epsilon={self.norm_epsilon} must be greater than 0")
        if self.num_heads % self.num_groups:
            raise ModelError(
                f"model config: {self.num_heads} Mamba heads do not divide into num_groups={self.num_groups}"
            )

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Channels of B, or of C, over all groups."""
        return self.num_groups * self.state_size


@dataclass(frozen=True)
class HybridLayers:
    """The layers of a hybrid model in place of a transformer's."""

    pattern: str
    """One symbol per layer, without pipeline stages; see `mca_lib.models.hybrid.pattern`."""
    mamba: Mamba2 | None = None
    """None where the pattern has no M."""

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not isinstance(self.mamba, Mamba2 | None):
            raise ModelError(
                f"model config: hybrid: pattern must be a text and mamba a Mamba2 or None, found {self.pattern!r:.80} "
                f"and {self.mamba!r:.80}"
            )
        if (MAMBA in self.pattern) != (self.mamba is not None):
            raise ModelError(f"model config: hybrid: sizes of Mamba layers go with M in the pattern, {self.pattern!r}")
