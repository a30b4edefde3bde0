"""Where models come from. Torch-free.

A model is a directory in Hugging Face's layout: config.json, tokenizer.json, safetensors weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.errors import ModelError
from engine.model.model_config import SUPPORTED

EMBEDDED = "embedded"
EMBEDDED_NAME = "smollm2-135m-instruct"
EMBEDDED_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "*.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
]
_HUB_COMPLETE = ".complete"


class _Digests(msgspec.Struct):
    source: str
    files: dict[str, str]


def embedded_model_dir(data_dir: Path) -> Path:
    """Where set-up leaves the embedded model."""
    return data_dir / "models" / EMBEDDED_NAME


def resolve_model(spec: str, data_dir: Path, progress: Callable[[str], None]) -> Path:
    """The directory of the model that `spec` names, complete and readable.

    `spec` is "embedded", a directory in Hugging Face's layout, or a hub id ("owner/name"), which
    is downloaded into the data directory once. Raises ModelError when the model is missing,
    damaged or cannot be fetched.
    """
    if spec == EMBEDDED:
        model_dir = embedded_model_dir(data_dir)
        progress(f"verifying the embedded model in {model_dir}")
        verify_embedded(model_dir)
    elif Path(spec).expanduser().is_dir():
        model_dir = Path(spec).expanduser().resolve()
    elif Path(spec).exists():
        raise ModelError(f"{spec} is a file; a model is given as a directory or a hub id")
    elif _HUB_ID.fullmatch(spec):
        model_dir = _from_hub(spec, data_dir, progress)
    else:
        raise ModelError(
            f"there is no model {spec!r}: give 'embedded', an existing directory, "
            "or a hub id such as 'owner/name'"
        )
    for name in ("config.json", "tokenizer.json"):
        if not (model_dir / name).is_file():
            raise ModelError(
                f"the model in {model_dir} cannot be used: it has no {name}; {SUPPORTED}"
            )
    return model_dir


def verify_embedded(model_dir: Path) -> None:
    """Check every file of the embedded model against its digest. Raises ModelError."""
    from engine.model.gguf_import import DIGESTS_FILE, sha256_of  # slow import, seldom needed

    hint = "run `make setup` to make it again"
    try:
        digests = msgspec.json.decode((model_dir / DIGESTS_FILE).read_bytes(), type=_Digests)
    except FileNotFoundError:
        raise ModelError(f"the embedded model is missing in {model_dir}; {hint}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise ModelError(f"{model_dir / DIGESTS_FILE} is damaged ({error}); {hint}") from None
    if digests.source != EMBEDDED_GGUF_SHA256:
        raise ModelError(f"the model in {model_dir} was made from another file; {hint}")
    for name, digest in digests.files.items():
        path = model_dir / name
        if not path.is_file() or sha256_of(path) != digest:
            raise ModelError(
                f"the embedded model is damaged: {path} is not as set-up wrote it; {hint}"
            )


def _from_hub(repo_id: str, data_dir: Path, progress: Callable[[str], None]) -> Path:
    """Download a repository's model files once. Raises ModelError when that fails."""
    target = data_dir / "models" / "hub" / repo_id.replace("/", "--")
    if (target / _HUB_COMPLETE).is_file():
        return target
    import httpx2  # the hub client's transport
    from huggingface_hub import snapshot_download

    progress(f"downloading {repo_id} to {target}")
    faults = (OSError, ValueError, RuntimeError, httpx2.HTTPError)
    try:
        snapshot_download(repo_id, local_dir=target, allow_patterns=_HUB_FILES)
    except faults as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"the model {repo_id!r} is no directory here and could not be downloaded: {reason}"
        ) from error
    (target / _HUB_COMPLETE).touch()
    return target
