"""Measures formats of weights: what each keeps of a model's answers, and how fast it is here.

All formats go through the sample text side by side, a layer of the model at a time: the tensors
are read once, and a model in fp32 need not fit into memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from torch.nn import functional

from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PAGE_SIZE
from engine.model.decoder import Decoder
from engine.model.geometry import ModelConfig
from engine.model.quantising import Quantiser
from engine.model.weights import LayerWeights, Projection, Weights, inverse_frequencies, make_layer
from engine.profile.one_sequence import CausalAttention, SequenceRows
from engine.profile.record import undisturbed
from engine.profile.weight_figures import FormatFigures, WeightFigures, WeightFormat
from kernels.elementwise import rms_norm
from kernels.kv import rope_table
from kernels.linear import PackedLinear
from kernels.quantised import QuantisedLinear

GetTensor = Callable[[str], Tensor]
ROWS = (1, 8, 32, 256)  # of the steps that are timed: decoding, and a slice of a prompt
ROUNDS = 2  # of timing, of which the fastest counts, behind one that does not
KEPT_BYTES = 256 << 20  # of layers in the plain format that are timed: more than caches hold
LOGIT_ROWS = 128  # at once


class _Side:
    """One format on its way through the layers."""

    def __init__(self, format: WeightFormat, dtype: torch.dtype, get: GetTensor) -> None:
        """get: the model's tensors by name, fp32."""
        self.format = format
        self.dtype = dtype
        self.hidden = torch.empty(0)
        self.kept: list[Projection] = []
        self.head: Projection | None = None
        self.num_bytes = 0
        self.quantiser: Quantiser | None = None
        self._get = get
        if format == "int8" or format == "int4":
            self.quantiser = Quantiser(format, dtype)

    def _tensor(self, name: str) -> Tensor:
        return self._get(name).to(self.dtype).contiguous()

    def layer(self, config: ModelConfig, number: int) -> LayerWeights:
        prefix = f"model.layers.{number}."
        if self.quantiser is None:
            layer = make_layer(self._tensor, config.family, prefix)
        else:
            project = self.quantiser.project
            layer = make_layer(self._tensor, config.family, prefix, project, self._get)
        self.num_bytes += sum(map(projection_bytes, projections(layer)))
        return layer

    def finish(self, name: str) -> Projection:
        """The head, by its tensor's name."""
        if self.quantiser is None:
            self.head = PackedLinear(self._tensor(name))
        else:
            self.head = self.quantiser.head(self._get(name))
        self.num_bytes += projection_bytes(self.head)
        return self.head


def projections(layer: LayerWeights) -> tuple[Projection, ...]:
    """What a step runs of a layer, in order."""
    return layer.qkv, layer.o, layer.gate_up, layer.down


def projection_bytes(projection: Projection) -> int:
    """Bytes of a projection's weight in memory."""
    if isinstance(projection, QuantisedLinear):
        return projection.num_bytes
    assert isinstance(projection, PackedLinear)
    return projection.out_features * projection.in_features * projection.dtype.itemsize


def measure_formats(
    get: GetTensor,
    config: ModelConfig,
    token_ids: Seq[int],
    dtype: torch.dtype,
    rows: Seq[int] = ROWS,
    *,
    rounds: int = ROUNDS,
    typical: Callable[[Seq[float]], float] = min,
) -> WeightFigures:
    """Quality and times of each format that the model can have, beside fp32.

    get: the model's tensors by name; token_ids: the sample text, at least two; rounds: of timing,
    of which `typical` makes one figure. int4 is left out where no projection lies on a 4-bit grid.
    Times are those of the main thread alone, so that other programs count as little as possible.
    """
    own: WeightFormat = "bf16" if dtype == torch.bfloat16 else "fp32"
    ids = torch.tensor(token_ids)

    def fp32(name: str) -> Tensor:
        return get(name).float()

    reference = _Side("fp32", torch.float32, fp32)
    plain = reference if own == "fp32" else _Side(own, dtype, fp32)
    others = [_Side("int8", dtype, fp32), _Side("int4", dtype, fp32)]
    sides = list(dict.fromkeys([reference, plain, *others]))
    table = rope_table(inverse_frequencies(config), len(ids))
    embedding = fp32("model.embed_tokens.weight")[ids]
    for side in sides:
        side.hidden = embedding.to(side.dtype)
    layer_bytes = 0
    kept = 0
    for number in range(config.num_layers):
        keeps = plain.num_bytes + layer_bytes <= KEPT_BYTES or not kept
        kept += keeps
        for side in list(sides):
            layer = side.layer(config, number)
            if side.format == "int4" and side.quantiser is not None and not side.quantiser.on_grid:
                sides.remove(side)
                continue
            _advance(side, layer, config, table)
            if keeps and (side is plain or side is not reference):  # these are timed
                side.kept.extend(projections(layer))
        layer_bytes = plain.num_bytes // (number + 1)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    final_norm = fp32("model.norm.weight")
    best: Tensor | None = None
    quality: dict[WeightFormat, tuple[float, float]] = {}
    for side in sides:
        normed = rms_norm(side.hidden, final_norm.to(side.dtype), config.rms_norm_eps)
        loss, top = _judge(side.finish(head), normed, ids)
        best = top if best is None else best
        quality[side.format] = (loss, float((top == best).float().mean()))
    timed = [plain, *(side for side in sides if side.quantiser is not None)]
    began = (time.thread_time(), time.perf_counter())
    times = _times(timed, rows, rounds)
    left = undisturbed(began)
    share = config.num_layers / kept
    seconds = {
        format: [typical(layers) * share + typical(head) for layers, head in by_rows]
        for format, by_rows in times.items()
    }
    return WeightFigures(
        fp32_loss=quality["fp32"][0],
        tokens=len(ids),
        rows=tuple(rows),
        formats=tuple(
            FormatFigures(
                format=side.format,
                loss=quality[side.format][0],
                agreement=quality[side.format][1],
                step_s=tuple(seconds[side.format]),
                num_bytes=side.num_bytes,
            )
            for side in timed
        ),
        undisturbed=left,
    )


def _advance(side: _Side, layer: LayerWeights, config: ModelConfig, table: Tensor) -> None:
    """Run one layer over the text: a model of one layer, whose embedding is its input."""
    count = len(side.hidden)
    cache = KVCache(1, -(-count // PAGE_SIZE), config.num_kv_heads, config.head_dim, side.dtype)
    weights = Weights(
        config=config,
        dtype=side.dtype,
        embedding=side.hidden,
        layers=(layer,),
        final_norm=layer.mlp_norm,
        head=layer.down,
        cos_sin=table,
        fingerprint=b"",
    )
    rows = SequenceRows.of(torch.arange(count))
    attention = CausalAttention(config.num_heads, config.head_dim, rows)
    (side.hidden,) = Decoder(weights, cache).leading(rows, attention, 1)


def _judge(head: Projection, normed: Tensor, ids: Tensor) -> tuple[float, Tensor]:
    """Mean loss in nats of each next token, and the likeliest ones int64 [n]."""
    total, top = 0.0, []
    following = torch.cat([ids[1:], ids[:1]])
    for start in range(0, len(ids), LOGIT_ROWS):
        logits = head(normed[start : start + LOGIT_ROWS].contiguous()).float()
        labels = following[start : start + LOGIT_ROWS].clone()
        if start + LOGIT_ROWS >= len(ids):
            labels[-1] = -100  # nothing follows the last token
        total += float(functional.cross_entropy(logits, labels, reduction="sum"))
        top.append(logits.argmax(-1))
    return total / (len(ids) - 1), torch.cat(top)


def _times(
    sides: Seq[_Side], rows: Seq[int], rounds: int
) -> dict[WeightFormat, list[tuple[list[float], list[float]]]]:
    """Seconds of the kept layers and of the head, of each round, by rows; the formats in turn."""
    times: dict[WeightFormat, list[tuple[list[float], list[float]]]]
    times = {side.format: [([], []) for _ in rows] for side in sides}
    for i, count in enumerate(rows):
        for number in range(rounds + 1):
            for side in sides:
                assert side.head is not None, "a side without a head is timed"
                for group, taken in zip(
                    (side.kept, [side.head]), times[side.format][i], strict=True
                ):
                    inputs = _inputs(group, count, side.dtype)
                    began = time.thread_time()
                    for projection in group:
                        projection(inputs[_width(projection)])
                    if number:  # the first round finds its memory
                        taken.append(time.thread_time() - began)
    return times


def _inputs(group: Seq[Projection], rows: int, dtype: torch.dtype) -> dict[int, Tensor]:
    widths = {_width(projection) for projection in group}
    return {width: torch.randn(rows, width).to(dtype) for width in widths}


def _width(projection: Projection) -> int:
    assert isinstance(projection, PackedLinear | QuantisedLinear)
    return projection.in_features
