"""Where compiled CPU kernels are kept; imported before any of them is defined.

Numba checks a cached function against its own source file only, not against those of what it
calls: kernels built of several modules would go stale unseen. So the cache's folder is named after
the digest of all their sources, and folders of other digests are removed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import numba
import numba.core.config as numba_config

_config: Any = numba_config  # its settings are made at run time
_PREFIX = "compiled-"
# what compiled code is made of: functions, vector code, and the constants that they take over
COMPILED = ("*_cpu.py", "*_tile.py", "*_ir.py", "*_rows.py", "parallel.py", "spans.py")


def _sources_digest() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    folder = Path(__file__).parent
    for path in sorted(path for pattern in COMPILED for path in folder.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _prepare() -> None:
    root = Path(__file__).parent / "__pycache__"
    if _config.CACHE_DIR:
        root = Path(_config.CACHE_DIR)
    elif not os.access(root if root.exists() else root.parent, os.W_OK):
        root = Path.home() / ".cache" / "rejoinder"
    ours = root / f"{_PREFIX}{_sources_digest()}"
    for other in root.glob(f"{_PREFIX}*"):
        if other != ours:
            shutil.rmtree(other, ignore_errors=True)
    _config.CACHE_DIR = str(ours)


_prepare()
