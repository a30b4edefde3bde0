"""The forward pass of a decoder over one step's rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import Batch
from engine.memory.kv_cache import KVCache
from engine.model.weights import Weights
from kernels.elementwise import add_rms_norm, qk_norm, rms_norm, silu_mul
from kernels.kv import restore_kv, write_kv

Record = Callable[[int, Tensor], None]
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], None]  # q, k_cache, v_cache, result


class Rows(Protocol):
    """What a layer needs to know of the rows it runs on; all int64 [num_tokens]."""

    @property
    def token_ids(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def slots(self) -> Tensor: ...


class _Buffers:
    """What the rows of a step are written to, layer after layer."""

    def __init__(self, num_rows: int, weights: Weights) -> None:
        c, like = weights.config, weights.embedding

        def rows(width: int) -> Tensor:
            return torch.empty((num_rows, width), dtype=like.dtype, device=like.device)

        self.hidden = rows(c.hidden_size)
        self.normed = rows(c.hidden_size)
        self.attended = rows(c.num_heads * c.head_dim)
        self.activated = rows(c.intermediate_size)

    def first(self, num_rows: int) -> _Buffers:
        """The first rows of each buffer."""
        part = _Buffers.__new__(_Buffers)
        part.hidden, part.normed = self.hidden[:num_rows], self.normed[:num_rows]
        part.attended, part.activated = self.attended[:num_rows], self.activated[:num_rows]
        return part


class Decoder:
    """Weights in, rows in, K/V written to the cache, logits out.

    Owns the buffers of `forward` on the CPU, which grow to the largest step; on CUDA a captured
    step must own its own. One thread.
    """

    def __init__(self, weights: Weights, cache: KVCache) -> None:
        self.weights = weights
        self.cache = cache
        c = weights.config
        self._q_width = c.num_heads * c.head_dim
        self._kv_width = c.num_kv_heads * c.head_dim
        self._q_shape = (-1, c.num_heads, c.head_dim)
        self._kv_shape = (-1, c.num_kv_heads, c.head_dim)
        self._kept: _Buffers | None = None
        self._used: _Buffers | None = None  # the first rows of it, as of the last step

    def forward(self, batch: Batch, attention: Attention, record: Record | None) -> Tensor:
        """Run all layers; returns logits [num_logits, vocab_size]: fp32 on CUDA, on the CPU in
        the dtype that the head gives, which loses nothing.

        `record(layer, hidden)` sees the input of each layer before its norm, [num_tokens,
        hidden_size]; it must copy what it keeps.
        """
        w = self.weights
        buffers = self._buffers(len(batch.token_ids))
        steps = self._run(batch, attention, record, len(w.layers), buffers)
        _, normed = deque(steps, maxlen=1)[0]
        rows = normed[batch.logit_rows] if len(batch.logit_rows) < len(normed) else normed
        if len(rows) == 0:
            return normed.new_empty((0, w.config.vocab_size), dtype=torch.float32)
        if w.config.family.norm_after:  # `normed` is the residual stream there
            rows = rms_norm(rows, w.final_norm, w.config.rms_norm_eps)
        logits = w.head(rows.contiguous())
        return logits.float() if logits.is_cuda else logits

    def _buffers(self, num_rows: int) -> _Buffers:
        if self.weights.embedding.is_cuda:
            return _Buffers(num_rows, self.weights)
        if self._used is None or len(self._used.hidden) != num_rows:
            if self._kept is None or len(self._kept.hidden) < num_rows:
                self._kept = _Buffers(num_rows, self.weights)
            self._used = self._kept.first(num_rows)
        return self._used

    def leading(self, rows: Rows, attention: Attention, num_layers: int) -> Iterator[Tensor]:
        """Run the first layers, one at a time; their K/V are in the cache afterwards.

        Yields, after each, the input of the next before its norm, [num_tokens, hidden_size], valid
        until the next is asked for. With num_layers 0: nothing; that input is `embed`.
        """
        buffers = _Buffers(len(rows.token_ids), self.weights)  # steps run in between
        for hidden, _ in self._run(rows, attention, None, num_layers, buffers):
            yield hidden

    def embed(self, token_ids: Tensor) -> Tensor:
        """The input of layer 0: token_ids int64 [n]; returns [n, hidden_size]."""
        return self.weights.embedding[token_ids]

    def _run(
        self,
        rows: Rows,
        attention: Attention,
        record: Record | None,
        num_layers: int,
        buffers: _Buffers,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Run layers; yields after each the residual stream and what the next block takes."""
        w, cache = self.weights, self.cache
        eps, after = w.config.rms_norm_eps, w.config.family.norm_after
        hidden, normed, attended = buffers.hidden, buffers.normed, buffers.attended
        activated = buffers.activated
        by_head = attended.view(self._q_shape)
        widths = [self._q_width, self._kv_width, self._kv_width]
        torch.index_select(w.embedding, 0, rows.token_ids, out=hidden)
        if not after:
            rms_norm(hidden, w.layers[0].attention_norm, eps, normed)
        block = hidden if after else normed  # the input of a block
        for i, layer in enumerate(w.layers[:num_layers]):
            if record is not None:
                record(i, hidden)
            q, k, v = layer.qkv(block).split_with_sizes(widths, 1)
            q, k, v = q.view(self._q_shape), k.view(self._kv_shape), v.view(self._kv_shape)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = qk_norm(q, layer.q_norm, eps), qk_norm(k, layer.k_norm, eps)
            k_cache, v_cache = cache.k[i], cache.v[i]
            write_kv(q, k, v, w.cos_sin, rows.positions, rows.slots, k_cache, v_cache)
            attention(q, k_cache, v_cache, by_head)
            if after:
                hidden.add_(rms_norm(layer.o(attended), layer.attention_norm, eps, normed))
                mlp = layer.down(silu_mul(layer.gate_up(hidden), activated))
                hidden.add_(rms_norm(mlp, layer.mlp_norm, eps, normed))
            else:
                add_rms_norm(layer.o(attended), hidden, layer.mlp_norm, eps, normed)
                mlp = layer.down(silu_mul(layer.gate_up(normed), activated))
                last = i + 1 == len(w.layers)
                following = w.final_norm if last else w.layers[i + 1].attention_norm
                add_rms_norm(mlp, hidden, following, eps, normed)
            yield hidden, block

    def restore(self, layer: int, hidden: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write one layer's K/V of rows whose hidden states came back.

        hidden [n, hidden_size], the layer's input before its norm; positions, slots int64 [n]; on
        the CPU or on the model's device.
        """
        w = self.weights
        weights, device = w.layers[layer], w.embedding.device
        k_cache, v_cache = self.cache.k[layer], self.cache.v[layer]
        restore_kv(
            hidden.to(device),
            None if w.config.family.norm_after else weights.attention_norm,
            w.config.rms_norm_eps,
            weights.kv,
            w.cos_sin,
            positions.to(device),
            slots.to(device),
            k_cache,
            v_cache,
            weights.k_norm,
        )
