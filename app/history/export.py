"""Chats on their way out: our own JSON format, and Markdown to read.

The JSON format is an object `{"format": "rejoinder-chats", "version": 1, "exported_at": ...,
"chats": [...]}`. A chat has `id, title, pinned, created_at, updated_at, assistant {name, version},
active_leaf, messages`; a message has `id, parent, role, text, status, finish_reason, error,
created_at, completed_at`. Messages are a tree: all branches are there, parents before children.
Times are in UTC, ISO 8601.
"""

from __future__ import annotations

import io
import re
import unicodedata
import zipfile
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import msgspec

from sessions.history_records import ExportedChat, ExportedMessage
from sessions.repository import Repository

FORMAT = "rejoinder-chats"
VERSION = 1
MAX_NAME_CHARS = 80
NOTES = {
    "stopped": "stopped",
    "interrupted": "interrupted",
    "failed": "failed",
    "running": "still being written when this was exported",
}
# Names that Windows keeps for devices, whatever their ending.
_DEVICES = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\.|$)", re.IGNORECASE)


async def json_chunks(
    repository: Repository, user_id: str, chat_ids: Sequence[str]
) -> AsyncIterator[bytes]:
    """The chats as one JSON document, a chat at a time; those deleted meanwhile are left out."""
    head = {"format": FORMAT, "version": VERSION, "exported_at": _time(datetime.now(UTC))}
    yield msgspec.json.encode(head)[:-1] + b',"chats":['
    separator = b"\n"
    async for chat in _chats(repository, user_id, chat_ids):
        yield separator + msgspec.json.encode(_as_json(chat))
        separator = b",\n"
    yield b"\n]}\n"


async def markdown_chunks(chat: ExportedChat) -> AsyncIterator[bytes]:
    yield markdown(chat).encode()


async def zip_chunks(
    repository: Repository, user_id: str, chat_ids: Sequence[str]
) -> AsyncIterator[bytes]:
    """A zip file with a Markdown file for each chat, made as it is sent."""
    sink = _Sink()
    names: set[str] = set()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        async for chat in _chats(repository, user_id, chat_ids):
            stem = f"{chat.created_at:%Y-%m-%d} {file_stem(chat.title)}"
            name, number = f"{stem}.md", 2
            while name.lower() in names:
                name, number = f"{stem} ({number}).md", number + 1
            names.add(name.lower())
            entry = zipfile.ZipInfo(name, chat.updated_at.timetuple()[:6])
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, markdown(chat))
            yield sink.take()
    yield sink.take()


def markdown(chat: ExportedChat) -> str:
    """The branch that the chat shows, as a document."""
    lines = [
        f"# {_one_line(chat.title)}",
        "",
        f"{_one_line(chat.assistant_name)}, version {chat.assistant_version}. "
        f"Begun {_day(chat.created_at)}, last changed {_day(chat.updated_at)}.",
    ]
    path = _active_path(chat)
    for message in path:
        speaker = "You" if message.role == "user" else _one_line(chat.assistant_name)
        lines += ["", f"## {speaker}, {_day(message.created_at)}", "", message.text.strip("\n")]
        note = NOTES.get(message.status)
        if note:
            lines += ["", f"*(This answer was {note}.)*"]
    aside = len(chat.messages) - len(path)
    if aside:
        lines += ["", f"*({aside} messages on other branches are not part of this document.)*"]
    return "\n".join(lines) + "\n"


def file_stem(title: str) -> str:
    """A title as part of a file name that every system takes."""
    kept = "".join(
        " " if char in '<>:"/\\|?*' or unicodedata.category(char)[0] == "C" else char
        for char in unicodedata.normalize("NFC", title)
    )
    stem = " ".join(kept.split())[:MAX_NAME_CHARS].strip(" .")
    while len(stem.encode()) > 2 * MAX_NAME_CHARS:
        stem = stem[:-1].strip(" .")
    if not stem:
        return "chat"
    return f"chat {stem}" if _DEVICES.match(stem) else stem


def content_disposition(name: str) -> str:
    """The header that has a response saved under this name (RFC 6266)."""
    plain = re.sub(r"[^ !#$&+\-.^_`|~0-9A-Za-z()]", "_", name)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"


async def _chats(
    repository: Repository, user_id: str, chat_ids: Sequence[str]
) -> AsyncIterator[ExportedChat]:
    for chat_id in chat_ids:
        chat = await repository.exported_chat(user_id, chat_id)
        if chat is not None:
            yield chat


def _active_path(chat: ExportedChat) -> list[ExportedMessage]:
    by_id = {message.id: message for message in chat.messages}
    path = []
    at = chat.active_leaf_id
    while at is not None:
        path.append(by_id[at])
        at = by_id[at].parent_id
    return path[::-1]


def _as_json(chat: ExportedChat) -> dict[str, Any]:
    return {
        "id": chat.id,
        "title": chat.title,
        "pinned": chat.pinned,
        "created_at": _time(chat.created_at),
        "updated_at": _time(chat.updated_at),
        "assistant": {"name": chat.assistant_name, "version": chat.assistant_version},
        "active_leaf": chat.active_leaf_id,
        "messages": [
            {
                "id": message.id,
                "parent": message.parent_id,
                "role": message.role,
                "text": message.text,
                "status": message.status,
                "finish_reason": message.finish_reason,
                "error": message.error,
                "created_at": _time(message.created_at),
                "completed_at": message.completed_at and _time(message.completed_at),
            }
            for message in chat.messages
        ],
    }


def _time(time: datetime) -> str:
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _day(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _one_line(text: str) -> str:
    return " ".join(text.split())


class _Sink(io.RawIOBase):
    """Takes what a zip file writes, to be sent on."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        taken, self._parts = b"".join(self._parts), []
        return taken
