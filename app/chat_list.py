"""The list of chats beside every page: its pages, and the deletions that can be undone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from app.history.purger import UNDO
from app.services import Services
from sessions.records import ChatCursor

PAGE_CHATS = 50
MOST_CHATS = 1000  # of a list that is brought up to date at once
_CURSOR = re.compile(r"([01])~([0-9T:.+-]{1,40})~([0-9a-f]{32})", re.ASCII)


@dataclass(frozen=True)
class Undoable:
    """A deleted chat, and for how many milliseconds more it can be brought back."""

    id: str
    title: str
    left_ms: int


async def chat_list(
    services: Services,
    user_id: str | None,
    *,
    current: str | None = None,
    after: str = "",
    shown: int = 0,
) -> dict[str, Any]:
    """What the list shows: the latest chats, or those after the place that `after` names.

    So many that a page which has `shown` of them loses none, within bounds.
    """
    repository = services.repository
    limit = min(MOST_CHATS, max(PAGE_CHATS, shown))
    place = cursor_of(after)
    chats, deleted = [], []
    if user_id is not None:
        chats = await repository.chats(user_id, limit=limit, after=place)
        ends = [(chat, chat.deleted_at + UNDO) for chat in await repository.deleted_chats(user_id)]
        now = datetime.now(UTC)
        deleted = [
            Undoable(chat.id, chat.title, int((end - now).total_seconds() * 1000))
            for chat, end in ends
            if end > now
        ]
    return {
        "chats": chats,
        "current_chat_id": current,
        "first_page": place is None,
        "older_after": as_text(chats[-1].cursor) if len(chats) == limit else "",
        "deleted": deleted,
    }


def as_text(cursor: ChatCursor) -> str:
    """A place in the list as part of an address."""
    return f"{cursor.pinned:d}~{cursor.updated_at.isoformat()}~{cursor.id}"


def cursor_of(text: str) -> ChatCursor | None:
    """The place that an address names; None for anything else, which shows the latest."""
    match = _CURSOR.fullmatch(text)
    if match is None:
        return None
    try:
        time = datetime.fromisoformat(match[2])
        time = (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return ChatCursor(pinned=match[1] == "1", updated_at=time, id=match[3])
