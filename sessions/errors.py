"""Errors that the sessions package reports to its callers."""

from __future__ import annotations

from pathlib import Path


class SessionsError(Exception):
    """Base of all errors of this package."""


class NotFound(SessionsError):
    """A row that the call needs is not there, or belongs to another chat."""

    def __init__(self, kind: str, key: str) -> None:
        super().__init__(f"no such {kind}: {key}")
        self.kind = kind
        self.key = key


class TurnRunning(SessionsError):
    """The chat has a turn that has not ended; it takes one at a time."""

    def __init__(self, chat_id: str) -> None:
        super().__init__(f"a turn of chat {chat_id} is still running")
        self.chat_id = chat_id


class NotRunning(SessionsError):
    """No answer of the chat is being written, so nothing can wait for its end."""

    def __init__(self, chat_id: str) -> None:
        super().__init__(f"no turn of chat {chat_id} is running")
        self.chat_id = chat_id


class AlreadyQueued(SessionsError):
    """A message of the chat waits already; it keeps one."""

    def __init__(self, chat_id: str) -> None:
        super().__init__(f"a message of chat {chat_id} is queued already")
        self.chat_id = chat_id


class StaleParent(SessionsError):
    """The message to go on from is no answer of this chat."""

    def __init__(self, chat_id: str, parent_id: str) -> None:
        super().__init__(f"message {parent_id} is no answer of chat {chat_id}")
        self.chat_id = chat_id
        self.parent_id = parent_id


class DatabaseClosed(SessionsError):
    """The database was closed before the transaction could be committed."""


class NotStored(SessionsError):
    """The database did not take a transaction, of which nothing is left; it may take the next."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not stored: {reason}")
        self.reason = reason


class DatabaseDamaged(SessionsError):
    """The file is there but cannot be read as a SQLite database."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} cannot be read as a database: {reason}")
        self.path = path


class SchemaOutdated(SessionsError):
    """The database's schema is older than this version of the program needs."""

    def __init__(self, path: Path, current: str | None, head: str) -> None:
        found = f"has schema {current}" if current else "has no schema yet"
        super().__init__(
            f"the database {path} {found}, this version needs {head}: "
            "run `rejoinder db upgrade` (it takes a backup first)"
        )
        self.path = path
        self.current = current
        self.head = head


class SchemaTooNew(SessionsError):
    """The database was made by a later version of the program."""

    def __init__(self, path: Path, current: str, head: str) -> None:
        super().__init__(
            f"the database {path} has schema {current}, which this version (up to {head}) does "
            "not know: use the version that made it, or restore a backup"
        )
        self.path = path
        self.current = current
        self.head = head


class NameTaken(SessionsError):
    """Another account has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the name {name!r} is taken")
        self.name = name


class LinkNotValid(SessionsError):
    """The link was used, taken back or has expired, or there never was one."""

    def __init__(self) -> None:
        super().__init__("the link is not valid any more")


class AssistantChanged(SessionsError):
    """The assistant is at another revision than the one that was looked at."""

    def __init__(self, assistant_id: str, revision: int) -> None:
        super().__init__(f"assistant {assistant_id} is at revision {revision}")
        self.assistant_id = assistant_id
        self.revision = revision
