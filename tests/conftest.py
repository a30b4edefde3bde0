"""What several test packages share."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from app.setup_model import set_up_embedded_model
from kernels.threading import configure_environment

configure_environment()  # before any test imports torch


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


if not _has_cuda_driver():
    # Triton's kernels run in its interpreter. It looks when it is imported, and others import it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

DATA_DIR = Path(__file__).parent.parent / "data"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """Directory of the embedded model, made when set-up has not made it yet."""
    return set_up_embedded_model(DATA_DIR, print)
