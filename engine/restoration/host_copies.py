"""Copies of what is saved, from a CUDA device to memory that the store's writer can read."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor


class Ready(Protocol):
    """Something that a copy ends with."""

    def synchronize(self) -> None:
        """Wait until the copy is there."""


class HostCopies:
    """Owns a stream of copies beside the steps, into pinned memory. Engine thread only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, tensors: Seq[Tensor]) -> tuple[list[Tensor], Ready]:
        """Copies of these, to be read once they are ready; nothing may overwrite them before.

        They are taken after all that was launched before; no step waits for them.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copies: list[Tensor] = []
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copies.append(copy.copy_(tensor, non_blocking=True))
                tensor.record_stream(self._stream)  # so that its memory is kept for so long
        ready = torch.cuda.Event()
        ready.record(self._stream)
        return copies, ready
