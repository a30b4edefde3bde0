"""What a search shows: chats whose title has the terms, then messages that have them, by chat."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sessions.folding import fold
from sessions.history_records import SearchHit
from sessions.repository import Repository

MAX_QUERY_CHARS = 200
MAX_TERMS = 8
HITS_READ = 60  # messages that one page of results looks at
HITS_SHOWN = 3  # of each chat
TITLES_SHOWN = 20
SNIPPET_CHARS = 160
BEFORE_MATCH = 50

Piece = tuple[str, bool]  # a part of a text, and whether it is one of the terms


@dataclass(frozen=True)
class Found:
    """One message: the part around the first match."""

    message_id: str
    speaker: str
    snippet: list[Piece]
    created_at: datetime
    active: bool


@dataclass
class FoundChat:
    """One chat. `more` counts its matches of this page that are not shown."""

    id: str
    title: list[Piece]
    updated_at: datetime
    messages: list[Found] = field(default_factory=list)
    more: int = 0


@dataclass(frozen=True)
class Results:
    """One page of results; `before` leads to the next, None when this is the last."""

    query: str
    terms: list[str]
    titles: list[FoundChat]
    chats: list[FoundChat]
    before: int | None


def terms_of(query: str) -> list[str]:
    """The words of a query as they are: no character of them means anything else."""
    text = unicodedata.normalize("NFC", query[:MAX_QUERY_CHARS]).replace("\0", " ")
    return list(dict.fromkeys(text.split()))[:MAX_TERMS]


async def find(
    repository: Repository, user_id: str, query: str, *, before: int | None = None
) -> Results:
    """Search a user's chats; titles are part of the first page only."""
    terms = terms_of(query)
    if not terms:
        return Results(query, [], [], [], None)
    titles = []
    if before is None:
        titles = await repository.search_titles(user_id, terms, limit=TITLES_SHOWN)
    hits = await repository.search_messages(user_id, terms, limit=HITS_READ, before=before)
    return Results(
        query=query,
        terms=terms,
        titles=[_chat(hit, terms) for hit in titles],
        chats=_by_chat(hits, terms),
        before=hits[-1].place if len(hits) == HITS_READ else None,
    )


def snippet(text: str, terms: Sequence[str]) -> list[Piece]:
    """The part of a text around its first match, on one line, the matches marked."""
    match = _pattern(terms).search(fold(text))
    at = match.start() if match else 0
    start = max(0, at - BEFORE_MATCH)
    if start > 0:  # begin with a word where one begins near
        space = text.find(" ", start, start + BEFORE_MATCH // 2)
        start = space + 1 if space >= 0 else start
    part = text[start : start + SNIPPET_CHARS]
    cut_off = start + SNIPPET_CHARS < len(text)
    pieces = marked(" ".join(part.split()), terms)
    if start > 0:
        pieces = [("… ", False), *pieces]
    return [*pieces, ("…", False)] if cut_off else pieces


def marked(text: str, terms: Sequence[str]) -> list[Piece]:
    """The whole text in pieces, each match a piece of its own."""
    pieces: list[Piece] = []
    end = 0
    for match in _pattern(terms).finditer(fold(text)):
        if match.start() > end:
            pieces.append((text[end : match.start()], False))
        pieces.append((text[match.start() : match.end()], True))
        end = match.end()
    if end < len(text):
        pieces.append((text[end:], False))
    return pieces


def _pattern(terms: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(map(fold, terms), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


def _chat(hit: SearchHit, terms: Sequence[str]) -> FoundChat:
    return FoundChat(hit.chat_id, marked(hit.chat_title, terms), hit.chat_updated_at)


def _by_chat(hits: Sequence[SearchHit], terms: Sequence[str]) -> list[FoundChat]:
    found: dict[str, FoundChat] = {}
    for hit in hits:
        chat = found.setdefault(hit.chat_id, _chat(hit, terms))
        if len(chat.messages) == HITS_SHOWN:
            chat.more += 1
            continue
        assert hit.message_id is not None
        assert hit.text is not None
        assert hit.created_at is not None
        chat.messages.append(
            Found(
                message_id=hit.message_id,
                speaker="You" if hit.role == "user" else "Assistant",
                snippet=snippet(hit.text, terms),
                created_at=hit.created_at,
                active=hit.active,
            )
        )
    return list(found.values())
