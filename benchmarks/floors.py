"""How many bytes and flops a step or a restore cannot do without, from a model's geometry alone."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.machine import Peak
from engine.model.model_config import ModelConfig

WEIGHT_BYTES = {"int8": 1.0625, "int4": 0.625}  # of a weight, its scales included
EIGHT_BIT_GAIN = 2.0  # of dot products in 8 bits over those in bf16
MIN_WIDE_BYTES = 2.0  # of a weight that is multiplied in bf16 or fp32


@dataclass(frozen=True)
class Precision:
    """Bytes that a side keeps for a weight and for a number of its K/V."""

    weight_bytes: float
    kv_bytes: float

    @classmethod
    def of(cls, format: str | None, item_bytes: int) -> Precision:
        """Ours, by the format of the weights (None: the dtype's) and the bytes of the dtype."""
        return cls(WEIGHT_BYTES.get(format or "", item_bytes), item_bytes)

    @property
    def weight_gain(self) -> float:
        """How many times the GEMM peak of the dtype products with the weights may be made at.

        8-bit dot products take twice as many numbers an instruction.
        """
        return EIGHT_BIT_GAIN if self.weight_bytes < MIN_WIDE_BYTES else 1.0


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
    item_bytes: float,
    peak: Peak,
    *,
    batch: int,
    prefix: int,
    suffix: float,
    shared: bool,
    kv_item_bytes: float | None = None,
    weight_gain: float = 1.0,
) -> float:
    """Seconds that one decode step of `batch` rows cannot go below.

    `item_bytes` of a weight, and of a number of the K/V unless `kv_item_bytes` differs.
    `weight_gain`: how many times the GEMM peak products with weights may be made at.

    Every weight is read once, with `shared` the prefix's K/V once and else once a row (that its
    one copy may stay in a cache is a side's own merit, so a share may exceed 1), the suffixes'
    once a row.
    """
    weights = config.num_layers * layer_params(config) + config.vocab_size * config.hidden_size
    keys_read = (prefix if shared else batch * prefix) + batch * suffix
    key_bytes = kv_bytes_per_token(config, 1) * (kv_item_bytes or item_bytes)
    num_bytes = weights * item_bytes + keys_read * key_bytes
    attention = 4.0 * config.num_layers * config.num_heads * config.head_dim * (prefix + suffix)
    return peak.floor_s(num_bytes, batch * (2.0 * weights / weight_gain + attention))


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
