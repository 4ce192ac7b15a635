"""A language model of attention, MLP, experts and Mamba-2 layers, in the order of `config.hybrid_layer_pattern`.

    hidden = embed_tokens(ids)
    for layer in layers:  hidden = hidden + layer.mixer(layer.norm(hidden))
    logits = lm_head(norm(hidden))

Shapes: B batch, S tokens of this call, T tokens with those before, E hidden size, V vocabulary.

Rows of a batch may be padded on either side, which `attention_mask` [B, T] says. `generate` keeps a `HybridState`:
keys and values of attention layers, convolution and state space of Mamba layers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from .configuration_mcaflow_hybrid import McaflowHybridConfig
from .layers_mcaflow_hybrid import MLP, Attention, Context, Experts, KeysValues, RMSNorm, Rotary
from .mamba2_mcaflow_hybrid import Mamba2, MambaState

LayerState = KeysValues | MambaState
"""Of an attention or a Mamba layer; the batch comes first in both."""


class HybridState:
    """What the layers keep of the tokens seen so far."""

    def __init__(self, num_layers: int) -> None:
        self.layers: list[LayerState | None] = [None] * num_layers
        self.seen = 0
        """Tokens, padding included."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Rows of the batch as beam search goes on with them."""
        self.layers = [
            layer and tuple(part.index_select(0, beam_idx.to(part.device)) for part in layer) for layer in self.layers
        ]


@dataclass
class HybridModelOutput(ModelOutput):
    last_hidden_state: torch.FloatTensor | None = None
    cache: HybridState | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class HybridCausalLMOutput(ModelOutput):
    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    cache: HybridState | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None


class HybridLayer(GradientCheckpointingLayer):
    """Norm and one of attention, MLP, experts and Mamba-2, around which the hidden states go."""

    def __init__(self, config: McaflowHybridConfig, layer_idx: int) -> None:
        super().__init__()
        self.kind = config.hybrid_layer_pattern[layer_idx]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.kind == "M":
            self.mamba = Mamba2(config)
        elif self.kind == "*":
            self.self_attn = Attention(config, layer_idx)
        elif self.kind == "-":
            self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)
        elif self.kind == "E":
            self.mlp = Experts(config)
        else:
            raise ValueError(f"hybrid_layer_pattern: {self.kind!r} is none of M, *, - and E")

    def forward(
        self, hidden_BSE: torch.Tensor, state: LayerState | None, context: Context
    ) -> tuple[torch.Tensor, LayerState | None]:
        inner_BSE = self.norm(hidden_BSE)
        if self.kind == "M":
            inner_BSE, state = self.mamba(inner_BSE, state, context.tokens_BS)
        elif self.kind == "*":
            inner_BSE, state = self.self_attn(inner_BSE, state, context)
        else:
            inner_BSE = self.mlp(inner_BSE)
        return hidden_BSE + inner_BSE, state


class McaflowHybridPreTrainedModel(PreTrainedModel):
    config_class = McaflowHybridConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("HybridLayer",)
    _supports_sdpa = True
    _is_stateful = True
    _keep_in_fp32_modules_strict = ("A_log", "D", "dt_bias")

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Rotary):
            module.reset(module.inv_freq.device)


class McaflowHybridModel(McaflowHybridPreTrainedModel):
    """The layers, between the embedding and the last norm."""

    def __init__(self, config: McaflowHybridConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(HybridLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Rotary(config)
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: HybridState | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> HybridModelOutput:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give one of input_ids and inputs_embeds")
        hidden_BSE = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if cache is None and use_cache:
            cache = HybridState(len(self.layers))
        context = self._context(hidden_BSE, attention_mask, position_ids, 0 if cache is None else cache.seen)
        visited = []
        for i, layer in enumerate(self.layers):
            visited.append(hidden_BSE)
            hidden_BSE, state = layer(hidden_BSE, None if cache is None else cache.layers[i], context)
            if cache is not None:
                cache.layers[i] = state
        if cache is not None:
            cache.seen += hidden_BSE.shape[1]
        hidden_BSE = self.norm(hidden_BSE)
        return HybridModelOutput(hidden_BSE, cache, (*visited, hidden_BSE) if output_hidden_states else None)

    def _context(
        self,
        hidden_BSE: torch.Tensor,
        attention_mask_BT: torch.Tensor | None,
        position_ids_BS: torch.Tensor | None,
        seen: int,
    ) -> Context:
        length, device = hidden_BSE.shape[1], hidden_BSE.device
        total = seen + length
        if attention_mask_BT is not None:
            if attention_mask_BT.shape != (len(hidden_BSE), total):
                raise ValueError(
                    f"attention_mask has shape {[*attention_mask_BT.shape]}, tokens {[len(hidden_BSE), total]}"
                )
            attention_mask_BT = None if attention_mask_BT.all() else attention_mask_BT.bool()
        if position_ids_BS is None:
            position_ids_BS = torch.arange(seen, total, device=device)[None]
            if attention_mask_BT is not None:
                position_ids_BS = (attention_mask_BT.long().cumsum(-1) - 1).clamp(min=0)[:, seen:]
        keys_T, queries_S = torch.arange(total, device=device), torch.arange(seen, total, device=device)
        causal_ST = keys_T <= queries_S[:, None]

        def mask(visible_ST: torch.Tensor) -> torch.Tensor | None:
            if attention_mask_BT is not None:
                # A row of padding sees itself, since a softmax over nothing is NaN.
                visible = visible_ST & attention_mask_BT[:, None, None]
                return visible | (keys_T == queries_S[:, None])
            plain = visible_ST.all() if length == 1 else seen == 0 and torch.equal(visible_ST, causal_ST)
            return None if plain else visible_ST[None, None]

        window = self.config.sliding_window
        return Context(
            rotary=self.rotary_emb(position_ids_BS, hidden_BSE.dtype),
            mask_B1ST=mask(causal_ST),
            window_B1ST=None if window is None else mask(causal_ST & (queries_S[:, None] - keys_T < window)),
            tokens_BS=None if attention_mask_BT is None else attention_mask_BT[:, seen:].to(hidden_BSE.dtype),
        )


class McaflowHybridForCausalLM(McaflowHybridPreTrainedModel, GenerationMixin):
    """With the output layer, the loss and `generate`."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: McaflowHybridConfig) -> None:
        super().__init__(config)
        self.model = McaflowHybridModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: HybridState | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> HybridCausalLMOutput:
        """`labels` are the ids themselves, -100 for no loss; `logits_to_keep`: the last ones, or these positions."""
        output = self.model(
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, output_hidden_states
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BSV = self.lm_head(output.last_hidden_state[:, kept])
        loss = None if labels is None else self.loss_function(logits_BSV, labels, self.vocab_size, **kwargs)
        return HybridCausalLMOutput(loss, logits_BSV, output.cache, output.hidden_states)

    # `generate` of any release of transformers: the state travels under the name `cache` and is made here.

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        cache: HybridState | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": input_ids if cache is None else input_ids[:, cache.seen :]}
        if inputs_embeds is not None and cache is None:
            inputs = {"inputs_embeds": inputs_embeds}
        return inputs | {
            "cache": cache,
            "attention_mask": attention_mask,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep,
        }

    def _update_model_kwargs_for_generation(
        self, outputs: ModelOutput, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        return model_kwargs if outputs.get("cache") is None else model_kwargs | {"cache": outputs["cache"]}
