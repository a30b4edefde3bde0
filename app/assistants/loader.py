"""Reads the built-in assistants from the data files beside this module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.messages import SamplingParams
from sessions.records import AssistantSeed

_DIRECTORY = Path(__file__).parent


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One data file; its name without suffix is the assistant's slug."""

    position: int  # place in the chooser; the lowest is the default
    name: str
    description: str
    greeting: str
    sampling: dict[str, Any]
    system_prompt: str


def builtin_assistants(directory: Path = _DIRECTORY) -> list[AssistantSeed]:
    """The assistants that the program ships, the default one first.

    Prompts are as in the files, without white space at either end. Raises ValueError, which names
    the file, for a damaged one.
    """
    files = [(path.stem, _read(path)) for path in directory.glob("*.toml")]
    files.sort(key=lambda item: (item[1].position, item[0]))
    return [
        AssistantSeed(
            slug=slug,
            name=file.name,
            description=file.description.strip(),
            greeting=file.greeting.strip(),
            system_prompt=file.system_prompt.strip(),
            sampling=file.sampling,
        )
        for slug, file in files
    ]


def _read(path: Path) -> _File:
    try:
        file = msgspec.toml.decode(path.read_bytes(), type=_File)
        unknown = sorted(set(file.sampling) - set(SamplingParams.__struct_fields__))
        if unknown:
            raise ValueError(f"there is no sampling parameter {unknown[0]!r}")
        msgspec.convert(file.sampling, SamplingParams)
    except ValueError as error:  # msgspec's own errors are ValueErrors too
        raise ValueError(f"assistant {path.name}: {error}") from error
    return file
