"""A model whose answers do not end by themselves."""

from __future__ import annotations

import json
from pathlib import Path

NEVER_SAMPLED = 16  # a special token of the embedded model that it was not trained to say


def endless_model(model_dir: Path, directory: Path) -> Path:
    """The model with another end token: its answers go on to the limit of their length."""
    copy = directory / model_dir.name
    copy.mkdir()
    for file in model_dir.iterdir():
        if file.name in ("config.json", "generation_config.json"):
            settings = json.loads(file.read_text()) | {"eos_token_id": NEVER_SAMPLED}
            (copy / file.name).write_text(json.dumps(settings))
        elif file.name != "digests.json":
            (copy / file.name).symlink_to(file)
    return copy
