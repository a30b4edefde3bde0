"""Memory that nothing uses goes back to the system."""

from __future__ import annotations

import ctypes
import gc


def settle_memory() -> None:
    """Give back what only loading needed; the collector passes over what stays from now on."""
    gc.collect()
    gc.freeze()
    trim_memory()


def trim_memory() -> None:
    """Give back what the C library's heap holds for later; some milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
