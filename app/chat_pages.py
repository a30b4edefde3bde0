"""What the pages and fragments of a chat show, gathered from database and running turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from app.conversation_views import (
    AnswerView,
    Branch,
    CandidatesView,
    ComposerView,
    Entry,
    QueuedView,
    UserView,
    branch_of,
)
from app.faults import NoSuchPage
from app.live_turn import LiveTurn
from app.pages import sidebar
from app.security import csrf_token
from app.services import HTTPRequest, Services, chats_shown
from app.views import Problem
from sessions.records import Chat, Latency, Message

LOOKS = 20


class Talk:
    """The active branch of a chat and what runs of it, of one moment."""

    def __init__(
        self, services: Services, chat: Chat, path: list[Message], lives: dict[str, LiveTurn]
    ) -> None:
        self.chat = chat
        self.path = path
        self.running = bool(lives)
        self._services = services
        self._lives = lives  # by the answer's id
        self._versions: dict[str, list[str]] = {}  # of the messages that are looked at
        self._latencies: dict[str, list[Latency]] = {}
        self._html: dict[str, str] = {}

    @classmethod
    async def of(cls, services: Services, chat: Chat) -> Talk:
        """A turn is in the database before it is live, and live until the database has its end."""
        repository, hub = services.repository, services.hub
        for _ in range(LOOKS):
            turns = await repository.running_turns(chat.id)
            path = await repository.path(chat.id)
            lives = [live for live in hub.running() if live.chat_id == chat.id]
            if {turn.id for turn in turns} == {live.turn_id for live in lives}:
                break
            await asyncio.sleep(0.01)  # one began or ended between the looks
        return cls(services, chat, path, {live.message_id: live for live in lives})

    async def entries(self, start: int = 0) -> list[Entry]:
        """Of the messages from this number on."""
        shown = self.path[start:]
        if not shown:
            return []
        await self._look_up(shown)
        entries: list[Entry] = []
        for depth, message in enumerate(shown, start):
            if message.role == "user":
                branch = self._branch([message.id])
                entries.append(
                    UserView(id=message.id, text=message.text, depth=depth, branch=branch)
                )
                continue
            last = depth == len(self.path) - 1
            group = await self._group(message) if last else []
            if len(group) > 1:
                entries.append(self._candidates(message, group, depth))
            else:
                branch = self._branch([message.id])
                entries.append(self._answer(message, last=last, depth=depth, branch=branch))
        return entries

    async def answer(self, message_id: str) -> AnswerView:
        """One answer, on the active branch or not. Raises NoSuchPage."""
        message = await self._services.repository.message(self.chat.id, message_id)
        if message is None:
            raise NoSuchPage
        await self._look_up([message])
        group = await self._group(message)
        if len(group) > 1:
            return self._candidate(message, [one.id for one in group].index(message_id) + 1)
        last = bool(self.path) and self.path[-1].id == message_id
        depth = self.depth(message_id) or 0
        branch = self._branch([message_id])
        return self._answer(message, last=last, depth=depth, branch=branch)

    def depth(self, message_id: str) -> int | None:
        """The number of a message on the active branch."""
        ids = [message.id for message in self.path]
        return ids.index(message_id) if message_id in ids else None

    async def composer(self) -> ComposerView:
        repository = self._services.repository
        prefix = await repository.prefix_by_id(self.chat.prefix_id)
        found = await repository.queued_message(self.chat.id)
        queued = None
        if found is not None:
            queued = QueuedView(text=found.text, problem=found.problem or "")
        return ComposerView(
            chat_id=self.chat.id,
            parent_id=self.path[-1].id if self.path else "",
            used=len(prefix.token_ids) + sum(len(message.token_ids) for message in self.path),
            limit=self._services.chat.context_limit,
            running=self.running,
            queued=queued,
            empty=not self.path,
        )

    async def _look_up(self, messages: Sequence[Message]) -> None:
        """Read what the views of these messages need."""
        repository = self._services.repository
        ids = [message.id for message in messages]
        self._versions = await repository.siblings(self.chat.id, ids)
        self._latencies = {}
        for one in await repository.chat_latency(self.chat.id):
            self._latencies.setdefault(one.message_id, []).append(one.latency)
        self._html = await self._rendered(messages)

    async def _rendered(self, messages: Sequence[Message]) -> dict[str, str]:
        """The HTML of those that do not run, nor only in the database."""
        ended = [
            replace(one, status="interrupted") if one.status == "running" else one
            for one in messages
            if one.id not in self._lives
        ]
        return await self._services.finished.html(ended)

    async def _group(self, message: Message) -> list[Message]:
        if message.group_id is None:
            return []
        group = await self._services.repository.candidates(self.chat.id, message.group_id)
        self._html |= await self._rendered(group)
        return group

    def _branch(self, shown: Sequence[str]) -> Branch | None:
        return branch_of(shown, self._versions.get(shown[0], []))

    def _candidates(self, leaf: Message, group: Sequence[Message], depth: int) -> CandidatesView:
        return CandidatesView(
            id=group[0].group_id or "",
            chat_id=self.chat.id,
            answers=[self._candidate(message, n) for n, message in enumerate(group, 1)],
            depth=depth,
            branch=self._branch([message.id for message in group]),
        )

    def _candidate(self, message: Message, number: int) -> AnswerView:
        chosen = bool(self.path) and self.path[-1].id == message.id
        return self._answer(message, last=chosen and not self.running, number=number, chosen=chosen)

    def _answer(self, message: Message, *, last: bool, **more: Any) -> AnswerView:
        return self._services.views.answer(
            message,
            html=self._html.get(message.id, ""),
            live=self._lives.get(message.id),
            latencies=self._latencies.get(message.id, ()),
            last=last,
            **more,
        )


async def chat_page(
    services: Services,
    request: HTTPRequest,
    chat: Chat,
    *,
    text: str = "",
    problem: Problem | None = None,
) -> str:
    """A chat with all its messages; what runs shows its text so far."""
    talk = await Talk.of(services, chat)
    origin = None
    if chat.carried is not None:
        origin = await services.repository.chat(chat.user_id, chat.carried.chat_id)
    context = await sidebar(services, chat.user_id, current=chat.id)
    context |= {
        "chat": chat,
        "assistant_seen": await services.repository.assistant(chat.user_id, chat.assistant_id),
        "origin": origin,
        "entries": await talk.entries(),
        "composer": await talk.composer(),
        "text": text,
        "problem": problem,
        "autofocus": True,
    }
    return services.views.page(request, "chat.html", context)


async def conversation_fragment(
    services: Services, request: HTTPRequest, chat: Chat, *, tail: int | None = None
) -> str:
    """The conversation and the composer's controls as they are now, or its last entries alone."""
    talk = await Talk.of(services, chat)
    entries = await talk.entries(max(0, len(talk.path) - tail) if tail else 0)
    return services.views.fragment(
        "conversation.html",
        csrf_token=csrf_token(request),
        entries=entries,
        composer=await talk.composer(),
    )


async def sent_fragment(services: Services, request: HTTPRequest, chat: Chat) -> str:
    """What a page of the chat needs after a message was sent: that, its answers, an empty field."""
    talk = await Talk.of(services, chat)
    entries = await talk.entries(max(0, len(talk.path) - 3))
    before = entries.pop(0) if len(talk.path) > 2 else None
    group_id = talk.path[-3].group_id if before else None
    shown = chats_shown(request)
    context = await sidebar(services, chat.user_id, current=chat.id, shown=shown)
    context |= {
        "csrf_token": csrf_token(request),
        "entries": entries,
        # Answers that stood side by side until now: the one that was gone on from stays.
        "group_id": group_id,
        "chosen": before,
        "composer": await talk.composer(),
        "text": "",
        "autofocus": False,
    }
    return services.views.fragment("sent.html", **context)


async def queue_fragment(
    services: Services, request: HTTPRequest, chat: Chat, *, text: str = ""
) -> str:
    """The composer after a message was queued, or withdrawn and is back in the field."""
    talk = await Talk.of(services, chat)
    return services.views.fragment(
        "queue_changed.html",
        csrf_token=csrf_token(request),
        composer=await talk.composer(),
        text=text,
        autofocus=False,
    )


async def ended_fragment(
    services: Services, chat: Chat, message_id: str, token: str, *, unseen: str = ""
) -> str:
    """What replaces a running answer after its end, and what the server sent after it.

    `unseen` is what was not yet announced of it, `token` the page's CSRF token. Raises NoSuchPage.
    """
    talk = await Talk.of(services, chat)
    depth = talk.depth(message_id)
    return services.views.fragment(
        "finished_frame.html",
        csrf_token=token,
        announced=Markup(unseen).striptags(),
        answer=await talk.answer(message_id),
        later=[] if depth is None else await talk.entries(depth + 1),
        composer=await talk.composer(),
    )


async def candidate_fragment(
    services: Services, chat: Chat, message_id: str, token: str, *, unseen: str = ""
) -> str:
    """What replaces one of several running answers after its end. Raises NoSuchPage."""
    talk = await Talk.of(services, chat)
    return services.views.fragment(
        "finished_candidate.html",
        csrf_token=token,
        announced=Markup(unseen).striptags(),
        answer=await talk.answer(message_id),
    )


async def candidates_fragment(
    services: Services, chat: Chat, group_id: str, token: str, message_ids: Sequence[str]
) -> str:
    """What replaces answers side by side when all have ended, and what was sent after them."""
    talk = await Talk.of(services, chat)
    depth = next((d for d in map(talk.depth, message_ids) if d is not None), None)
    return services.views.fragment(
        "finished_candidates.html",
        csrf_token=token,
        group_id=group_id,
        entries=[] if depth is None else await talk.entries(depth),
        composer=await talk.composer(),
    )
