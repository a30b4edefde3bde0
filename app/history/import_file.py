"""An uploaded file, a chat at a time: JSON as it is or in a zip file, never whole in memory."""

from __future__ import annotations

import json
import re
import struct
import zipfile
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from app.faults import Fault
from app.history.export import FORMAT, VERSION

MIB = 1 << 20
MAX_UPLOAD_BYTES = 100 * MIB
MAX_JSON_BYTES = 1024 * MIB  # unpacked
MAX_CHAT_BYTES = 32 * MIB
MAX_DIRECTORY_BYTES = 8 * MIB  # of a zip file: about 80,000 files
CHUNK_BYTES = 256 * 1024

_MEMBER = re.compile(r"(?:.*/)?conversations(?:[-_]\d+)?\.json", re.IGNORECASE)
_SPACE = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb"[^ \t\r\n,\]}]*")
_STRUCTURE = re.compile(rb'["{}\[\]]')
# The rest of a string after its opening quote; possessive, so that it keeps no way back.
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class ImportRefused(Fault):
    """The file as a whole cannot be read; the message says why and what would be right."""


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
        """Raises ImportRefused for what is neither format."""
        self._file = file
        self._number = 0
        self._done_bytes = 0
        self._current: _Json | None = None
        file.seek(0)
        if file.read(2) == b"PK":
            self._archive: zipfile.ZipFile | None = _open_archive(file)
            self._members: list[zipfile.ZipInfo | None] = list(_members(self._archive))
            self.total_bytes = sum(one.file_size for one in self._members if one is not None)
        else:
            self._archive, self._members = None, [None]
            self.total_bytes = file.seek(0, 2)
        if self.total_bytes > MAX_JSON_BYTES:
            raise ImportRefused(
                f"Unpacked, the chats have {self.total_bytes // MIB:,} MiB; "
                f"up to {MAX_JSON_BYTES // MIB:,} MiB can be imported."
            )
        self._entries = self._read()
        self._first = next(self._entries, None)
        if self._first is None:
            raise ImportRefused("There is no chat in this file.")

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
        text = self._current = _Json(source, size)
        if text.take(b"["):
            yield from self._array(text, own=False)
        elif text.take(b"{"):
            yield from self._object(text)
        else:
            raise ImportRefused("This is neither a JSON file nor a zip file with one in it.")
        self._done_bytes += text.read_bytes
        self._current = None

    def _array(self, text: _Json, *, own: bool) -> Iterator[Entry]:
        more = not text.take(b"]")
        while more:
            self._number += 1
            try:
                raw = text.value(MAX_CHAT_BYTES)
            except ImportRefused as error:
                raise ImportRefused(f"Chat {self._number}: {error}") from None
            data = _decoded(raw)
            if isinstance(data, dict):
                yield Entry(self._number, own, data)
            else:
                yield Entry(self._number, own, None, "it cannot be read as JSON")
            more = text.take(b",")
            if not more and not text.take(b"]"):
                raise ImportRefused(f"The file is damaged or cut off after chat {self._number}.")

    def _object(self, text: _Json) -> Iterator[Entry]:
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


class _Json:
    """Cuts a JSON text into values without building them."""

    def __init__(self, source: IO[bytes], size: int) -> None:
        self._source = source
        self._size = size
        self._buffer = b""
        self._at = 0
        self.read_bytes = 0
        self._fill()
        if self._buffer.startswith(b"\xef\xbb\xbf"):
            self._at = 3

    def take(self, char: bytes) -> bool:
        """Skip white space, and this character if it comes next."""
        self._skip_space()
        found = self._buffer[self._at : self._at + 1] == char
        self._at += found
        return found

    def value(self, limit: int) -> bytes:
        """The next value as it is written. Raises ImportRefused: cut off, or over the limit."""
        self._skip_space()
        self._buffer, self._at = self._buffer[self._at :], 0
        if self._buffer[:1] in (b"{", b"["):
            end = self._balanced(limit)
        elif self._buffer[:1] == b'"':
            end = self._string(1, limit)
        else:
            end = self._scalar(limit)
        self._at = end
        return self._buffer[:end]

    def _balanced(self, limit: int) -> int:
        """Where the object or list ends that begins the buffer."""
        at = depth = 0
        while True:
            found = _STRUCTURE.search(self._buffer, at)
            if found is None:
                at = len(self._buffer)
                self._more(limit)
                continue
            at = found.end()
            if found.group() == b'"':
                at = self._string(at, limit)
            elif found.group() in (b"{", b"["):
                depth += 1
            else:
                depth -= 1
                if depth == 0:
                    return at

    def _string(self, at: int, limit: int) -> int:
        """Where the string ends whose characters begin at `at`."""
        while (match := _STRING.match(self._buffer, at)) is None:
            self._more(limit)
        return match.end()

    def _scalar(self, limit: int) -> int:
        while True:
            match = _SCALAR.match(self._buffer)
            assert match is not None, "it matches nothing too"
            if match.end() < len(self._buffer) or not self._fill():
                return match.end()
            if len(self._buffer) > limit:
                raise ImportRefused(f"it has over {limit // MIB:,} MiB.")

    def _skip_space(self) -> None:
        while True:
            match = _SPACE.match(self._buffer, self._at)
            assert match is not None, "it matches nothing too"
            self._at = match.end()
            if self._at < len(self._buffer) or not self._fill():
                return

    def _more(self, limit: int) -> None:
        if len(self._buffer) > limit:
            raise ImportRefused(f"it has over {limit // MIB:,} MiB.")
        if not self._fill():
            raise ImportRefused("the file is cut off in it.")

    def _fill(self) -> bool:
        """Read on, ever more of a long value, so that it is not gone through again and again."""
        room = self._size - self.read_bytes  # a zip file's own word is not taken for it
        data = self._source.read(min(max(CHUNK_BYTES, len(self._buffer)), room)) if room else b""
        self.read_bytes += len(data)
        self._buffer += data
        return bool(data)


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
