"""Core attention of the local layer, on torch's scaled_dot_product_attention.

Megatron's own local core attention materializes the scores, knows no packed rows and no context parallelism. This
one runs a flash kernel (on CPU too, 2 to 5 times faster from 512 tokens on) and covers them:

- packed rows (`thd`): one causal attention per document, so no document sees another;
- context parallelism: keys and values are gathered from all ranks, and each rank's two zigzag chunks of a document
  (see `packing`) attend to what lies before them. Gradients of the gathered tensors are reduce-scattered;
- sliding windows: a document that is no longer than the window keeps the flash kernel, a longer one is cut into blocks
  of queries of the window's size, so that a mask is at most window x 2 windows;
- attention sinks: a score per head that belongs to no token (https://arxiv.org/abs/2309.17453).

Letters: S tokens on this rank, T tokens of the row, B batch, N query heads, G key/value heads, D head size.
"""

import contextlib
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from mca_lib.models.packing import document_bounds, zigzag_index

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class SDPACoreAttention(MegatronModule):
    """Causal softmax attention; takes Megatron's core attention arguments."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type not in _CAUSAL:
            raise NotImplementedError(f"attention mask {attn_mask_type}: only causal attention is implemented")
        self.softmax_offset: torch.nn.Parameter | None = None
        """[N]: what each head's softmax has for no token, as Megatron names it; see `_with_sinks`."""
        if config.softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(self._initial_sinks())
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        elif config.softmax_type != "vanilla":
            raise NotImplementedError(f"softmax_type {config.softmax_type} is not implemented")
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window: int | None = None
        """Tokens that a query sees, its own included."""
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = config.window_size[0] + 1
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.context_group = groups.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attention output, [S, B, N·D]; packed: [S, N·D].

        query is [S, B, N, D] and key, value [S, B, G, D]; packed rows come without B. The mask is causal whatever
        `attention_mask` holds: rows are right-padded or packed, so no token ever sees padding.
        """
        if attention_bias is not None:
            raise NotImplementedError("attention bias is not implemented")
        packed = packed_seq_params is not None
        if packed:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        ranks = self.context_group.size()
        bounds = document_bounds(packed_seq_params) if packed else [0, query.shape[0] * ranks]
        if ranks == 1:
            context = self._documents(query, key, value, bounds)
        else:
            context = self._context_parallel(query, key, value, bounds)
        context = context.flatten(2)
        return context.squeeze(1) if packed else context

    def _documents(
        self, query_SBND: torch.Tensor, key_SBGD: torch.Tensor, value_SBGD: torch.Tensor, bounds: list[int]
    ) -> torch.Tensor:
        spans = [slice(a, b) for a, b in itertools.pairwise(bounds) if b > a]
        outputs = [self._attend(query_SBND[s], key_SBGD[s], value_SBGD[s]) for s in spans]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _context_parallel(
        self, query_SBND: torch.Tensor, key_SBGD: torch.Tensor, value_SBGD: torch.Tensor, bounds: list[int]
    ) -> torch.Tensor:
        ranks, rank = self.context_group.size(), self.context_group.rank()
        gathered = gather_from_sequence_parallel_region(
            torch.cat([key_SBGD, value_SBGD], dim=-1), tensor_parallel_output_grad=True, group=self.context_group
        )
        natural_order = torch.argsort(torch.cat(zigzag_index(bounds, ranks))).to(gathered.device)
        key_TBGD, value_TBGD = gathered.index_select(0, natural_order).split(
            [key_SBGD.shape[-1], value_SBGD.shape[-1]], dim=-1
        )
        outputs, position = [], 0
        for start, stop in itertools.pairwise(bounds):
            size = (stop - start) // (2 * ranks)
            for chunk in (rank, 2 * ranks - 1 - rank) if size else ():
                seen = slice(start, start + (chunk + 1) * size)
                chunk_query = query_SBND[position : position + size]
                outputs.append(self._attend(chunk_query, key_TBGD[seen], value_TBGD[seen]))
                position += size
        return torch.cat(outputs)

    def _attend(self, query_SBND: torch.Tensor, key_TBGD: torch.Tensor, value_TBGD: torch.Tensor) -> torch.Tensor:
        """Attention of the last S of T positions to those before them, as far as the window goes."""
        queries, keys = len(query_SBND), len(key_TBGD)
        if self.window is None or keys <= self.window:
            return self._attend_at_once(query_SBND, key_TBGD, value_TBGD)
        outputs, before = [], keys - queries
        for start in range(0, queries, self.window):
            stop = min(start + self.window, queries)
            seen = slice(max(0, before + start + 1 - self.window), before + stop)
            outputs.append(self._attend_at_once(query_SBND[start:stop], key_TBGD[seen], value_TBGD[seen]))
        return torch.cat(outputs)

    def _attend_at_once(
        self, query_SBND: torch.Tensor, key_TBGD: torch.Tensor, value_TBGD: torch.Tensor
    ) -> torch.Tensor:
        """Attention of the last S of T positions, with a mask where the kernel's own causal one does not do."""
        query_BNSD, key_BGTD, value_BGTD = (t.permute(1, 2, 0, 3) for t in (query_SBND, key_TBGD, value_TBGD))
        queries, keys = query_BNSD.shape[2], key_BGTD.shape[2]
        mask_ST, sinks = None, self.softmax_offset is not None
        if sinks:
            query_BNSD, key_BGTD, value_BGTD = self._with_sinks(query_BNSD, key_BGTD, value_BGTD)
        if queries != keys:
            mask_ST = torch.ones(queries, keys, dtype=torch.bool, device=query_BNSD.device).tril(keys - queries)
            if self.window is not None:
                mask_ST = mask_ST.triu(keys - queries + 1 - self.window)
            if sinks:
                mask_ST = F.pad(F.pad(mask_ST, (1, 0), value=True), (0, 0, 1, 0), value=True)
        dropout = self.dropout if self.training else 0.0
        with self._dropout_seed(dropout):
            context_BNSD = F.scaled_dot_product_attention(
                query_BNSD,
                key_BGTD,
                value_BGTD,
                attn_mask=mask_ST,
                is_causal=mask_ST is None,
                dropout_p=dropout,
                scale=self.scale,
                enable_gqa=query_BNSD.shape[1] != key_BGTD.shape[1],
            )
        if sinks:
            context_BNSD = context_BNSD[:, :, 1:, :-1]
        return context_BNSD.permute(2, 0, 1, 3)

    def _with_sinks(
        self, query_BNSD: torch.Tensor, key_BGTD: torch.Tensor, value_BGTD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same with a token before the first, of value 0, whose score is the head's sink for every query.

        Queries have one channel more, which holds the sink, and of all keys that of this token alone reads it. So any
        kernel computes the softmax over scores and sink, and its gradients. The token's own query is of no use, and
        keeps the causal mask square.
        """
        sinks_N11 = (self.softmax_offset.float() / self.scale).type_as(query_BNSD)[:, None, None]
        sinks_BNS1 = sinks_N11.expand_as(query_BNSD[..., :1])
        query_BNSD = F.pad(torch.cat([query_BNSD, sinks_BNS1], dim=-1), (0, 0, 1, 0))
        key_BGTD, value_BGTD = F.pad(key_BGTD, (0, 1, 1, 0)), F.pad(value_BGTD, (0, 1, 1, 0))
        reads = torch.zeros_like(key_BGTD[0, 0])
        reads[0, -1] = 1
        return query_BNSD, key_BGTD + reads, value_BGTD

    def _initial_sinks(self) -> torch.Tensor:
        """This rank's share of values that do not depend on the tensor parallel size."""
        group = parallel_state.get_tensor_model_parallel_group()
        sinks_N = torch.empty(self.config.num_attention_heads, dtype=self.config.params_dtype)
        if self.config.perform_initialization:
            self.config.init_method(sinks_N)
        return sinks_N.chunk(group.size())[group.rank()].clone()

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """For Megatron's checkpoints: sinks are split over the heads."""
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)

    def _dropout_seed(self, dropout: float) -> contextlib.AbstractContextManager[None]:
        """Heads are split over tensor parallel ranks, so each rank must draw its own dropout mask.

        Under sequence parallelism the whole transformer block already runs on the rank's own random state.
        """
        own_state = dropout and not self.config.sequence_parallel
        return get_cuda_rng_tracker().fork() if own_state else contextlib.nullcontext()
