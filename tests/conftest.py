"""What several test packages share."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.setup_model import set_up_embedded_model
from kernels.threading import configure_environment

configure_environment()  # before any test imports torch

DATA_DIR = Path(__file__).parent.parent / "data"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """Directory of the embedded model, made when set-up has not made it yet."""
    return set_up_embedded_model(DATA_DIR, print)
