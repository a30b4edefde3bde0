"""Safetensors files on disk: headers read without loading a weight, and a streaming writer.

Torch-free. The format is eight bytes of header length (little endian), a JSON header that maps a
name to dtype, shape and byte range, then the data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from engine.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 << 20
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
_ITEM_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor of a header; offsets are bytes from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, each checked to lie within the file.

    Raises ModelError when the file is missing, truncated or not a safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(
                    f"{path.name} is truncated or corrupt: it has {size} bytes, "
                    f"its header alone claims {length + 8}"
                )
            raw = file.read(length)
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}") from error
    try:
        entries = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = {n: msgspec.json.decode(e, type=TensorInfo) for n, e in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path.name} is corrupt: its header is no valid JSON ({error})") from None
    end = 0
    for name, tensor in tensors.items():
        first, last = tensor.data_offsets
        item = _ITEM_BYTES.get(tensor.dtype)
        if first < 0 or (item is not None and last - first != item * prod(tensor.shape)):
            raise ModelError(
                f"{path.name} is corrupt: {name} does not fill its {last - first} bytes"
            )
        end = max(end, last)
    if 8 + length + end != size:
        raise ModelError(
            f"{path.name} is truncated or corrupt: it has {size} bytes, "
            f"its header describes {8 + length + end}"
        )
    return tensors


def read_headers(model_dir: Path) -> dict[str, tuple[Path, TensorInfo]]:
    """Every tensor of a model directory, with the file that holds it; sharded or single.

    Raises ModelError when a file is missing, truncated or corrupt, or lacks a tensor of the index.
    """
    index_path = model_dir / INDEX_FILE
    if (model_dir / SINGLE_FILE).is_file():
        path = model_dir / SINGLE_FILE
        return {name: (path, tensor) for name, tensor in read_header(path).items()}
    if not index_path.is_file():
        raise ModelError(f"it has no weights ({SINGLE_FILE} or {INDEX_FILE})")
    try:
        weight_map = msgspec.json.decode(index_path.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{INDEX_FILE} is damaged: {error}") from None
    headers: dict[str, dict[str, TensorInfo]] = {}
    found: dict[str, tuple[Path, TensorInfo]] = {}
    for name, file_name in weight_map.items():
        if Path(file_name).name != file_name:
            raise ModelError(f"{INDEX_FILE} is damaged: it names {file_name!r}, not a plain file")
        if file_name not in headers:
            headers[file_name] = read_header(model_dir / file_name)
        if name not in headers[file_name]:
            raise ModelError(f"{file_name} lacks {name}, which {INDEX_FILE} places there")
        found[name] = (model_dir / file_name, headers[file_name][name])
    return found


def files_identity(model_dir: Path) -> str:
    """Changes when a weight file of the directory does: names, sizes and times, not contents.

    For what is measured once of a model; checkpoints go by the digest of the weights themselves.
    Raises ModelError as `read_headers` does.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted({path for path, _ in read_headers(model_dir).values()}):
        found = path.stat()
        digest.update(repr((path.name, found.st_size, found.st_mtime_ns)).encode())
    return digest.hexdigest()


def write_fp32(
    path: Path,
    layout: Sequence[tuple[str, tuple[int, ...]]],
    tensors: Iterable[npt.NDArray[np.float32]],
) -> None:
    """Write a safetensors file of fp32 tensors, one in memory at a time, in the layout's order.

    Raises ValueError when a tensor's shape is not that of the layout.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in layout:
        end = offset + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # data starts aligned, as the reference writer does
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for (name, shape), tensor in zip(layout, tensors, strict=True):
            if tensor.shape != shape:
                raise ValueError(f"{name} has shape {tensor.shape}, expected {shape}")
            file.write(np.ascontiguousarray(tensor, dtype="<f4").data)
