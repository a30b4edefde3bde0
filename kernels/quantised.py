"""Linear layers whose weights are 4 or 8 bits, and whose inputs are rounded to 8 bits on the way.

A weight is d * q + m with q in 0..15, or d * q with q in -127..127; d and m (fp16) hold for an
output and 32 inputs, as in GGUF's Q4_1 and Q8_0. A row of inputs is rounded by itself, 32 numbers
to a scale, and products are summed exactly in integers, group after group in one order: a row's
result never depends on the rows beside it, bit for bit. `wide` layers keep 16 bits of the inputs,
as two planes of 8, and give fp32: for a head, whose roundings would go straight into the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

GROUP = 32  # inputs that share a scale
BLOCK = 16  # outputs that are computed together
Bits = Literal[4, 8]


@dataclass(frozen=True)
class Grid:
    """A weight on a grid: codes uint8 [out, in]; scale, offset fp16 [out, in / 32].

    weight = scale * code + offset with 4 bits; scale * (code - 128), and no offset, with 8.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None

    @property
    def bits(self) -> Bits:
        return 8 if self.offset is None else 4

    def weight(self) -> Tensor:
        """The numbers themselves, fp32 [out, in]."""
        codes = self.codes.view(*self.scale.shape, GROUP).float()
        scale = self.scale.float()[..., None]
        if self.offset is None:
            return ((codes - 128) * scale).flatten(1)
        return (codes * scale + self.offset.float()[..., None]).flatten(1)


def fits(weight: Tensor) -> bool:
    """Whether a weight [out, in] can be quantised at all."""
    return weight.shape[1] % GROUP == 0


def four_bit_grid(weight: Tensor) -> Grid | None:
    """The 4-bit grid on which every number of a weight lies exactly; None when there is none.

    weight fp32 [out, in], such as a dequantised Q4_1 tensor.
    """
    if not fits(weight):
        return None
    parts = []
    for rows in weight.split(_rows_at_once(weight)):
        groups = rows.view(len(rows), -1, GROUP)
        low, high = groups.aminmax(dim=-1)
        scale, offset = ((high - low) / 15).half(), low.half()
        step = torch.where(scale == 0, 1.0, scale.float())[..., None]
        codes = ((groups - low[..., None]) / step).round_().clamp_(0, 15)
        part = Grid(codes.to(torch.uint8).flatten(1), scale, offset)
        if not torch.equal(part.weight(), rows):
            return None
        parts.append(part)
    offsets = [part.offset for part in parts if part.offset is not None]
    return Grid(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(offsets),
    )


def eight_bit_grid(weight: Tensor) -> Grid:
    """The nearest numbers on 8-bit grids: exactly the weight where it was a Q8_0 tensor.

    weight fp32 [out, in], in a multiple of 32. Raises ValueError for numbers that fp16 scales
    cannot reach.
    """
    codes, scales = [], []
    for rows in weight.split(_rows_at_once(weight)):
        groups = rows.view(len(rows), -1, GROUP)
        scale = (groups.abs().amax(-1) / 127).half()
        if not torch.isfinite(scale).all():
            raise ValueError("weights beyond 8 million cannot be rounded to 8 bits")
        step = torch.where(scale == 0, 1.0, scale.float())[..., None]
        rounded = (groups / step).round_().clamp_(-127, 127).add_(128)
        codes.append(rounded.to(torch.uint8).flatten(1))
        scales.append(scale)
    return Grid(torch.cat(codes), torch.cat(scales), None)


def _rows_at_once(weight: Tensor) -> int:
    """So many that what is computed of them stays in the caches."""
    return max(1, (1 << 17) // weight.shape[1])


class QuantisedLinear:
    """x -> x W^T + b with W on a grid. Immutable; on the CPU only."""

    def __init__(self, grid: Grid, bias: Tensor | None = None, *, wide: bool = False) -> None:
        """bias [out], of any dtype; wide: with 8 bits only."""
        if wide and grid.bits != 8:
            raise ValueError(f"a wide layer has 8 bits, not {grid.bits}")
        out, inner = grid.codes.shape
        self.bits = grid.bits
        self._planes = 2 if wide else 1
        self.out_features, self.in_features = out, inner
        self._groups = inner // GROUP
        self._blocks = -(-out // BLOCK)
        rows = self._blocks * BLOCK
        self._bias = torch.zeros(rows)
        if bias is not None:
            self._bias[:out] = bias
        codes = _padded(grid.codes, rows)
        if grid.offset is None:
            pieces = codes.view(self._blocks, BLOCK, self._groups, 8, 4)
            self._codes = pieces.permute(0, 2, 3, 1, 4).contiguous()
        else:
            pieces = codes.view(self._blocks, BLOCK, self._groups, 4, 2, 4)
            halves = pieces.permute(4, 0, 2, 3, 1, 5)
            self._codes = (halves[0] | halves[1] << 4).contiguous()
        parts = [grid.scale] if grid.offset is None else [grid.scale, grid.offset]
        parts = [_padded(part, rows).view(self._blocks, BLOCK, -1).mT for part in parts]
        self._scales = torch.cat(parts, dim=1).contiguous()

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """All numbers that the layer consists of, as they lie in memory."""
        return self._codes, self._scales, self._bias

    @property
    def num_bytes(self) -> int:
        """Of codes, scales and bias."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def last_rows(self, count: int) -> QuantisedLinear:
        """The same layer without its first outputs; shares memory with this one."""
        first = (self.out_features - count) // BLOCK
        if first * BLOCK != self.out_features - count:
            raise ValueError(f"{self.out_features - count} outputs are no multiple of {BLOCK}")
        part = QuantisedLinear.__new__(QuantisedLinear)
        part.__dict__.update(self.__dict__)
        part.out_features = count
        part._blocks -= first
        part._codes, part._scales = self._codes[first:], self._scales[first:]
        part._bias = self._bias[first * BLOCK :]
        return part

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in], rows contiguous, bf16 or fp32, any T; returns a new [T, out].

        In x's dtype, or fp32 if the layer is wide.
        """
        from kernels import parallel, quantised_cpu  # not where there is no numba

        rows, inner = x.shape
        if inner != self.in_features or x.stride(1) != 1:
            raise ValueError(f"rows of {inner} do not fit {self.in_features} inputs")
        if x.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{x.dtype} is not supported: fp32 or bf16")
        width = self._blocks * BLOCK
        out_dtype = torch.float32 if self._planes == 2 else x.dtype
        out = torch.empty((rows, width), dtype=out_dtype)
        row_bytes = self._planes * self._groups * (GROUP + 8)
        scratch = torch.empty(rows * row_bytes, dtype=torch.uint8)
        quantised_cpu.linear(
            self.bits,
            self._planes,
            x.dtype == torch.bfloat16,
            out_dtype == torch.bfloat16,
            self._codes.data_ptr(),
            self._scales.data_ptr(),
            self._groups,
            self._blocks,
            x.data_ptr(),
            x.stride(0) * x.element_size(),
            rows,
            self._bias.data_ptr(),
            out.data_ptr(),
            width * out_dtype.itemsize,
            scratch.data_ptr(),
            parallel.num_threads(),
            quantised_cpu.QUANTISE.address,
            quantised_cpu.PRODUCT.address,
        )
        return out if width == self.out_features else out[:, : self.out_features].contiguous()


def _padded(tensor: Tensor, rows: int) -> Tensor:
    if len(tensor) == rows:
        return tensor
    filled = tensor.new_zeros((rows, *tensor.shape[1:]))
    filled[: len(tensor)] = tensor
    return filled


def is_fast() -> bool:
    """Whether this CPU multiplies bytes in vectors; elsewhere results are the same, but slow."""
    from kernels.quantised_ir import HAS_BYTE_DOT

    return HAS_BYTE_DOT


def warm_up(dtype: torch.dtype) -> None:
    """Make all kernels of this module ready for inputs of this dtype, fp32 or bf16.

    About 20 s when nothing is compiled yet.
    """
    x = torch.zeros(1, GROUP, dtype=dtype)
    QuantisedLinear(eight_bit_grid(torch.zeros(BLOCK, GROUP)))(x)
