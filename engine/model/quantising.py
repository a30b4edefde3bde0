"""From a model's numbers to projections of 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from engine.model.weights import Projection
from kernels.linear import PackedLinear
from kernels.quantised import QuantisedLinear, eight_bit_grid, fits, four_bit_grid

QuantisedFormat = Literal["int8", "int4"]


class Quantiser:
    """Makes the projections of one format. Counts those that it found on a 4-bit grid.

    int4 takes the grid that a quantised file brought and rounds nothing: a projection that lies on
    none gets 8 bits. int8 rounds every weight to 8 bits, 32 numbers to a scale. A width that is no
    multiple of 32 stays in `dtype`. Heads have 8 bits and take their inputs in 16.
    """

    def __init__(
        self,
        format: QuantisedFormat,
        dtype: torch.dtype,
        digest: Callable[[Tensor], None] | None = None,
    ) -> None:
        """digest: told the bytes that each projection consists of, uint8 of one dimension."""
        self.on_grid = 0
        self._format = format
        self._dtype = dtype
        self._digest = digest

    def project(self, weight: Tensor, bias: Tensor | None = None) -> Projection:
        """weight fp32 [out, in]; bias [out]."""
        if not fits(weight):
            return self._packed(weight, bias)
        grid = four_bit_grid(weight) if self._format == "int4" else None
        self.on_grid += grid is not None
        return self._told(QuantisedLinear(grid or eight_bit_grid(weight), bias))

    def head(self, weight: Tensor) -> Projection:
        """weight fp32 [vocab_size, in]."""
        if not fits(weight):
            return self._packed(weight, None)
        return self._told(QuantisedLinear(eight_bit_grid(weight), wide=True))

    def _packed(self, weight: Tensor, bias: Tensor | None) -> Projection:
        rounded = weight.to(self._dtype)
        self._tell(rounded)
        return PackedLinear(rounded, bias)

    def _told(self, layer: QuantisedLinear) -> QuantisedLinear:
        for buffer in layer.buffers:
            self._tell(buffer)
        return layer

    def _tell(self, tensor: Tensor) -> None:
        if self._digest is not None:
            self._digest(tensor.view(-1).view(torch.uint8))
