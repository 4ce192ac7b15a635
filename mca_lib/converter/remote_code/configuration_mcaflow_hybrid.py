"""Config of a hybrid of attention, MLP, experts and Mamba-2 layers.

`hybrid_layer_pattern` has one symbol per layer:

    M   Mamba-2            *   attention            -   gated MLP            E   mixture of experts
"""

from typing import Any

from transformers import PretrainedConfig


class McaflowHybridConfig(PretrainedConfig):
    """Sizes and switches; fields that are not explained here have the meaning that they have for Llama and Qwen.

    Args:
        full_attention_layers: layers, counted from 0 in the pattern, without the sliding window.
        sliding_window: tokens that a query sees, its own included; null: all before it.
        attention_bias: of queries, keys and values.
        use_qk_norm: an RMSNorm over each head of query and key, before they rotate.
        mamba_num_groups: groups of heads that share B and C.
        mamba_chunk_size: tokens that the scan takes at once at most; the result does not depend on it.
        norm_topk_prob: weights of the chosen experts sum to 1, before `routed_scaling_factor`.
        shared_expert_intermediate_size: of the expert that every token goes to; null: there is none.
        use_shared_expert_gate: the shared expert's output is scaled by a sigmoid gate.
        router_aux_loss_coef: of the balancing loss in the training that wrote the weights; no loss here uses it.
    """

    model_type = "mcaflow_hybrid"
    keys_to_ignore_at_inference = ("cache",)

    def __init__(
        self,
        hybrid_layer_pattern: str = "M*-",
        vocab_size: int = 32000,
        hidden_size: int = 512,
        intermediate_size: int = 1536,
        num_attention_heads: int = 8,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        max_position_embeddings: int = 2048,
        rms_norm_eps: float = 1e-6,
        rope_parameters: dict[str, Any] | None = None,
        sliding_window: int | None = None,
        full_attention_layers: tuple[int, ...] | list[int] = (),
        attention_bias: bool = False,
        attention_output_bias: bool = False,
        mlp_bias: bool = False,
        use_qk_norm: bool = False,
        attention_dropout: float = 0.0,
        mamba_num_heads: int | None = None,
        mamba_head_dim: int = 64,
        mamba_state_size: int = 128,
        mamba_num_groups: int = 1,
        mamba_conv_kernel: int = 4,
        mamba_chunk_size: int = 128,
        mamba_norm_eps: float = 1e-5,
        num_experts: int = 0,
        num_experts_per_tok: int = 2,
        moe_intermediate_size: int | None = None,
        norm_topk_prob: bool = True,
        routed_scaling_factor: float = 1.0,
        shared_expert_intermediate_size: int | None = None,
        use_shared_expert_gate: bool = False,
        router_aux_loss_coef: float = 0.0,
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = False,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.hybrid_layer_pattern = hybrid_layer_pattern
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": 10000.0}
        self.sliding_window = sliding_window
        self.full_attention_layers = list(full_attention_layers)
        self.attention_bias = attention_bias
        self.attention_output_bias = attention_output_bias
        self.mlp_bias = mlp_bias
        self.use_qk_norm = use_qk_norm
        self.attention_dropout = attention_dropout
        self.mamba_num_heads = mamba_num_heads or 2 * hidden_size // mamba_head_dim
        self.mamba_head_dim = mamba_head_dim
        self.mamba_state_size = mamba_state_size
        self.mamba_num_groups = mamba_num_groups
        self.mamba_conv_kernel = mamba_conv_kernel
        self.mamba_chunk_size = mamba_chunk_size
        self.mamba_norm_eps = mamba_norm_eps
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.moe_intermediate_size = moe_intermediate_size or intermediate_size
        self.norm_topk_prob = norm_topk_prob
        self.routed_scaling_factor = routed_scaling_factor
        self.shared_expert_intermediate_size = shared_expert_intermediate_size
        self.use_shared_expert_gate = use_shared_expert_gate
        self.router_aux_loss_coef = router_aux_loss_coef
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.num_hidden_layers = len(hybrid_layer_pattern)
        kwargs.pop("num_hidden_layers", None)  # follows from the pattern
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
