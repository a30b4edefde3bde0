"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.harness import HarnessFactory, Oracle, make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grouped-query attention: K/V are smaller than hidden states."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), num_kv_heads=2)


@pytest.fixture
def make_engine(tiny_model: Path) -> Iterator[HarnessFactory]:
    factory = HarnessFactory(tiny_model)
    yield factory
    for harness in factory.made:
        harness.close()


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)
