"""How many bytes and flops a step or a restore cannot do without, from a model's geometry alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.machine import Peak
from engine.model.model_config import ModelConfig
from engine.model.weights import Weights
from engine.profile.formats import projection_bytes, projections
from kernels.quantised import QuantisedLinear

WEIGHT_BYTES = {"int8": 1.0625, "int4": 0.625}  # of a weight, its scales included
MIN_WIDE_BYTES = 2.0  # of a weight that is multiplied in bf16 or fp32


class Work(NamedTuple):
    """What a part of a step cannot do without."""

    num_bytes: float  # read from memory
    flops: float  # in the dtype
    int8_flops: float  # products of bytes

    def __add__(self, other: Work) -> Work:  # type: ignore[override]  # not a tuple's
        return Work(*(mine + its for mine, its in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Precision:
    """Bytes that a side keeps for a weight and for a number of its K/V."""

    weight_bytes: float
    kv_bytes: float
    head_bytes: float | None = None  # of a weight of the head; None: as of the others
    head_planes: int = 1  # products of bytes that take the place of one with the head

    @classmethod
    def of(cls, format: str | None, item_bytes: int) -> Precision:
        """By the format of the weights (None: the dtype's) and the bytes of the dtype."""
        return cls(WEIGHT_BYTES.get(format or "", item_bytes), item_bytes)

    @classmethod
    def of_weights(cls, weights: Weights) -> Precision:
        """Ours, as the weights are packed. A head in few bits takes its inputs as two planes."""
        config = weights.config
        packed = sum(
            projection_bytes(projection)
            for layer in weights.layers
            for projection in projections(layer)
        )
        return cls(
            packed / (config.num_layers * layer_params(config)),
            weights.dtype.itemsize,
            projection_bytes(weights.head) / head_params(config),
            2 if isinstance(weights.head, QuantisedLinear) else 1,
        )

    def layers_work(self, config: ModelConfig, rows: float) -> Work:
        """The projections of all layers, for that many rows."""
        return self._products(config.num_layers * layer_params(config), self.weight_bytes, rows, 1)

    def head_work(self, config: ModelConfig, rows: float) -> Work:
        """The head, for that many rows."""
        each = self.weight_bytes if self.head_bytes is None else self.head_bytes
        return self._products(head_params(config), each, rows, self.head_planes)

    def _products(self, weights: int, each: float, rows: float, planes: int) -> Work:
        flops = 2.0 * rows * weights
        if each < MIN_WIDE_BYTES:
            return Work(weights * each, 0.0, planes * flops)
        return Work(weights * each, flops, 0.0)

    def attention_work(self, config: ModelConfig, keys_read: float, pairs: float) -> Work:
        """K/V of so many tokens read, and products of so many pairs of a row and a key."""
        flops = 4.0 * config.num_layers * config.num_heads * config.head_dim * pairs
        return Work(keys_read * kv_bytes_per_token(config, 1) * self.kv_bytes, flops, 0.0)


def head_params(config: ModelConfig) -> int:
    """Weights of the head."""
    return config.vocab_size * config.hidden_size


def layer_params(config: ModelConfig) -> int:
    """Weights of one layer's projections."""
    query = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    width, inner = config.hidden_size, config.intermediate_size
    return width * (query + 2 * kv) + query * width + 3 * width * inner


def kv_bytes_per_token(config: ModelConfig, item_bytes: int) -> int:
    """K and V of all layers."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * item_bytes


def decode_floor_s(
    config: ModelConfig,
    precision: Precision,
    peak: Peak,
    *,
    batch: int,
    prefix: int,
    suffix: float,
    shared: bool,
) -> float:
    """Seconds that one decode step of `batch` rows cannot go below.

    Every weight is read once, with `shared` the prefix's K/V once and else once a row (that its
    one copy may stay in a cache is a side's own merit, so a share may exceed 1), the suffixes'
    once a row.
    """
    keys_read = (prefix if shared else batch * prefix) + batch * suffix
    work = precision.layers_work(config, batch) + precision.head_work(config, batch)
    work += precision.attention_work(config, keys_read, batch * (prefix + suffix))
    return peak.floor_s(*work)


def prefill_floor_s(config: ModelConfig, precision: Precision, peak: Peak, tokens: int) -> float:
    """Seconds that reading a prompt of so many tokens, up to its first answer, cannot go below."""
    work = precision.layers_work(config, tokens) + precision.head_work(config, 1)
    work += precision.attention_work(config, tokens, tokens * (tokens + 1) / 2)
    return peak.floor_s(*work)


@dataclass(frozen=True)
class RestoreCosts:
    """Least seconds of one layer of a restore: GEMMs at their peak, reads at the raw bandwidth.

    Copying K/V into pages is taken to be free, and so are fill and drain of the pipeline.
    """

    num_layers: int
    c_layer: float  # recompute
    c_hidden: float  # project K and V
    io_hidden: float
    io_kv: float

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        item_bytes: int,
        flops_per_s: float,
        read_bytes_per_s: float,
        *,
        prefix: int,
        num_tokens: int,
    ) -> RestoreCosts:
        """For `num_tokens` private tokens below a resident prefix."""
        n, kv = num_tokens, config.num_kv_heads * config.head_dim
        pairs = n * prefix + n * (n + 1) / 2  # of queries and keys
        flops = 2.0 * n * layer_params(config) + 4.0 * config.num_heads * config.head_dim * pairs
        return cls(
            num_layers=config.num_layers,
            c_layer=flops / flops_per_s,
            c_hidden=4.0 * n * config.hidden_size * kv / flops_per_s,
            io_hidden=n * config.hidden_size * item_bytes / read_bytes_per_s,
            io_kv=2.0 * n * kv * item_bytes / read_bytes_per_s,
        )

    def makespan(self, recompute: int, hidden: int, kv: int) -> float:
        """max(compute, I/O) of a plan with these numbers of layers.

        One hidden layer needs no bytes: the input of the first layer that is not recomputed is at
        hand (the embedding, or the output of the last recomputed one).
        """
        compute = recompute * self.c_layer + hidden * self.c_hidden
        return max(compute, max(0, hidden - 1) * self.io_hidden + kv * self.io_kv)

    def lower_bound(self) -> float:
        """The best makespan over all plans, by brute force."""
        layers = self.num_layers
        return min(
            self.makespan(r, h, layers - r - h)
            for r in range(layers + 1)
            for h in range(layers - r + 1)
        )
