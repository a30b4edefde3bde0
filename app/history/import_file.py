"""An uploaded file, a chat at a time: JSON as it is or in a zip file, never whole in memory."""

from __future__ import annotations

import json
import re
import struct
import zipfile
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from app.faults import InvalidField
from app.history.export import FORMAT, VERSION
from app.history.json_cutter import MIB, JsonBroken, JsonCutter

MAX_UPLOAD_BYTES = 100 * MIB
MAX_JSON_BYTES = 1024 * MIB  # unpacked
MAX_CHAT_BYTES = 32 * MIB
MAX_DIRECTORY_BYTES = 8 * MIB  # of a zip file: about 80,000 files

_MEMBER = re.compile(r"(?:.*/)?conversations(?:[-_]\d+)?\.json", re.IGNORECASE)


class ImportRefused(InvalidField):
    """The file as a whole cannot be read; the message says why and what would be right."""

    def __init__(self, text: str) -> None:
        super().__init__("file", text)


class Entry(NamedTuple):
    """One chat of the file. `data` is None when it cannot be read; `problem` says why."""

    number: int
    own: bool  # of our own format, else of ChatGPT's
    data: dict[str, Any] | None
    problem: str = ""


class ImportFile:
    """Owns an open file; one thread at a time may read it.

    In a zip file the conversations count, and everything else is passed over.
    """

    def __init__(self, file: IO[bytes]) -> None:
        """Takes the file over. Raises ImportRefused for what is neither format, and closes it."""
        self._file = file
        self._number = 0
        self._done_bytes = 0
        self._current: JsonCutter | None = None
        self._archive: zipfile.ZipFile | None = None
        self._members: list[zipfile.ZipInfo | None] = [None]
        try:
            self.total_bytes = self._look()
            self._entries = self._read()
            self._first = next(self._entries, None)
            if self._first is None:
                raise ImportRefused("There is no chat in this file.")
        except ImportRefused:
            file.close()
            raise

    def _look(self) -> int:
        """Find out what the file is; returns how many bytes there are to read."""
        self._file.seek(0)
        if self._file.read(2) != b"PK":
            return self._file.seek(0, 2)
        self._archive = _open_archive(self._file)
        members = _members(self._archive)
        self._members = list(members)
        total = sum(one.file_size for one in members)
        if total > MAX_JSON_BYTES:
            raise ImportRefused(
                f"Unpacked, the chats have {total // MIB:,} MiB; "
                f"up to {MAX_JSON_BYTES // MIB:,} MiB can be imported."
            )
        return total

    @property
    def read_bytes(self) -> int:
        return self._done_bytes + (0 if self._current is None else self._current.read_bytes)

    def next(self) -> Entry | None:
        """The next chat, None at the end. Raises ImportRefused when the file is broken there."""
        first, self._first = self._first, None
        return first or next(self._entries, None)

    def close(self) -> None:
        self._file.close()

    def _read(self) -> Iterator[Entry]:
        for member in self._members:
            if member is None or self._archive is None:
                self._file.seek(0)
                yield from self._document(self._file, self.total_bytes)
                continue
            try:
                with self._archive.open(member) as source:
                    yield from self._document(source, member.file_size)
            except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
                raise ImportRefused(f"The zip file is damaged: {error}.") from error

    def _document(self, source: IO[bytes], size: int) -> Iterator[Entry]:
        text = self._current = JsonCutter(source, size)
        try:
            if text.take(b"["):
                yield from self._array(text, own=False)
            elif text.take(b"{"):
                yield from self._object(text)
            else:
                raise ImportRefused("This is neither a JSON file nor a zip file with one in it.")
        except JsonBroken as error:
            raise ImportRefused(f"The file cannot be read: {error}") from None
        self._done_bytes += text.read_bytes
        self._current = None

    def _array(self, text: JsonCutter, *, own: bool) -> Iterator[Entry]:
        more = not text.take(b"]")
        while more:
            self._number += 1
            try:
                raw = text.value(MAX_CHAT_BYTES)
            except JsonBroken as error:
                raise ImportRefused(f"Chat {self._number}: {error}") from None
            data = _decoded(raw)
            if isinstance(data, dict):
                yield Entry(self._number, own, data)
            else:
                yield Entry(self._number, own, None, "it cannot be read as JSON")
            more = text.take(b",")
            if not more and not text.take(b"]"):
                raise ImportRefused(f"The file is damaged or cut off after chat {self._number}.")

    def _object(self, text: JsonCutter) -> Iterator[Entry]:
        """Our own document, or a single conversation of ChatGPT's."""
        head: dict[str, Any] = {}
        more = not text.take(b"}")
        while more:
            key = _decoded(text.value(MAX_CHAT_BYTES))
            if not isinstance(key, str) or not text.take(b":"):
                raise ImportRefused("The file is no valid JSON.")
            if key == "chats" and text.take(b"["):
                _check_own(head)
                yield from self._array(text, own=True)
                return
            head[key] = _decoded(text.value(MAX_CHAT_BYTES))
            more = text.take(b",")
        if "mapping" not in head:
            raise ImportRefused(
                "The file has neither our format nor that of a ChatGPT export: "
                "choose a JSON file exported here, or ChatGPT's zip file or its conversations.json."
            )
        self._number += 1
        yield Entry(self._number, False, head)


def _decoded(raw: bytes) -> Any:
    """The value of a JSON text; None for what is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _check_own(head: dict[str, Any]) -> None:
    if head.get("format") != FORMAT or type(head.get("version")) is not int:
        raise ImportRefused(f"The file says nowhere before its chats that its format is {FORMAT}.")
    if head["version"] > VERSION:
        raise ImportRefused(
            f"The file is of a later version ({head['version']}) of our format; "
            f"this server knows versions up to {VERSION}."
        )


def _open_archive(file: IO[bytes]) -> zipfile.ZipFile:
    """Looks at the size of the list of files first: all of it is read at once."""
    if _directory_bytes(file) > MAX_DIRECTORY_BYTES:
        raise ImportRefused("The zip file has too many files in it.")
    try:
        return zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ImportRefused(f"The zip file is damaged: {error}.") from error


def _directory_bytes(file: IO[bytes]) -> int:
    """The size that a zip file gives its list of files, 0 when it has no end record."""
    size = file.seek(0, 2)
    start = max(0, size - (22 + 20 + 65535))
    file.seek(start)
    tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) < at + 22:
        return 0
    (found,) = struct.unpack_from("<L", tail, at + 12)
    if found == 0xFFFFFFFF and at >= 20 and tail[at - 20 : at - 16] == b"PK\x06\x07":
        (record,) = struct.unpack_from("<Q", tail, at - 12)
        file.seek(min(record, size))
        large = file.read(56)
        found = struct.unpack_from("<Q", large, 40)[0] if len(large) == 56 else 0
    return int(found)


def _members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The files with conversations in them, in order. Raises ImportRefused."""
    named = [one for one in archive.infolist() if _MEMBER.fullmatch(one.filename)]
    if not named:
        named = [one for one in archive.infolist() if one.filename.lower().endswith(".json")]
        if len(named) != 1:
            raise ImportRefused("The zip file has no conversations.json in it.")
    for one in named:
        if one.flag_bits & 1:
            raise ImportRefused("The zip file is encrypted: unpack it and choose the JSON file.")
        if one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ImportRefused("The zip file is packed in an unusual way: pack it anew.")
    return sorted(named, key=lambda one: one.filename)
