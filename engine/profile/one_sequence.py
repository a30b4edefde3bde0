"""One sequence's tokens through layers, without an engine: for what measures a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.memory.page_pool import PAGE_SIZE
from kernels.attention import merge_states, prefill_attention
from kernels.spans import Spans


@dataclass(frozen=True)
class SequenceRows:
    """Tokens [past, past + n) of a sequence that lies in the cache's first pages."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: Spans

    @classmethod
    def of(cls, token_ids: Tensor, past: int = 0) -> SequenceRows:
        """token_ids int64 [n]."""
        end = past + len(token_ids)
        where = torch.arange(past, end)
        pages = range(-(-end // PAGE_SIZE))
        spans = Spans.build([(0, len(token_ids), [(pages, end)], True)])
        return cls(token_ids, where, where, spans)


class CausalAttention:
    """Causal attention of one sequence's rows, as a prefill step has it."""

    def __init__(self, num_heads: int, head_dim: int, rows: SequenceRows) -> None:
        shape = (1, len(rows.token_ids), num_heads, head_dim)
        self._spans = rows.spans
        self._scale = head_dim**-0.5
        self._out, self._lse = torch.empty(shape), torch.empty(shape[:3])

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, result: Tensor) -> None:
        prefill_attention(q, k_cache, v_cache, self._spans, self._scale, self._out, self._lse)
        merge_states(self._out, self._lse, result)
