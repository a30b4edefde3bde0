"""A server's days on one data directory, by a seed: chats in the database, chunks in the store."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from sessions.chunks import ChunkStore
from sessions.database import Database
from sessions.records import AssistantSeed, Progress, Turn
from sessions.repository import Repository
from tests.crash.recording import Recording
from tests.sessions.chunk_support import FINGERPRINT, STRIPE_BYTES, Ids, restore, save

ROOMY = 1 << 30
STEPS = 40
LATER = datetime.now(UTC) + timedelta(days=400)


@dataclass(frozen=True, slots=True)
class Stored:
    """A message that the database said is durable."""

    message_id: str
    chat_id: str
    text: str
    ids: list[int]
    ended: bool = True  # an answer that runs may have more by now


@dataclass(frozen=True, slots=True)
class Saved:
    """Tokens of a chat that the store said are durable, from the first on."""

    chat_id: str
    ids: Ids


@dataclass(frozen=True, slots=True)
class Deleting:
    """A chat's deletion was asked for; `done` when it was confirmed."""

    chat_id: str
    done: bool


Event = Stored | Saved | Deleting


@dataclass(frozen=True, slots=True)
class Doing:
    """What the changes to one of the two, "database" or "store", are for from here on."""

    where: str
    what: str


# The first part of the names of the store writer's steps.
STEPS_OF = {
    "settle": "start",
    "close": "end",
    "compact": "compaction",
    "collect": "collection of stale checkpoints",
    "reject": "rejection",
}


@dataclass(slots=True)
class _Chat:
    id: str
    leaves: list[tuple[str | None, list[int]]]  # of answers: id, ids of the path with them
    running: Turn | None = None
    path: list[int] = field(default_factory=list)  # with the message that is being answered


class Life:
    """Makes one life; every change to its files is in the recording."""

    def __init__(self, data: Path, seed: int, recording: Recording) -> None:
        self._data = data
        self._rng = random.Random(seed)
        self._recording = recording
        self.cap = ROOMY
        if self._rng.random() < 0.6:
            self.cap = self._rng.randrange(3, 9) * STRIPE_BYTES
        self._chats: list[_Chat] = []
        self.compactions = 0
        self.evictions = 0
        self._step_before = ""

    @property
    def dirs(self) -> list[Path]:
        return [self._data / "chunks0", self._data / "chunks1"]

    async def live(self) -> None:
        await self._open()
        user = await self._repository.create_user("hash")
        seed = AssistantSeed(
            slug="a", name="A", description="", greeting="", system_prompt="Help.", sampling={}
        )
        await self._repository.sync_builtin_assistants([seed])
        [assistant] = await self._repository.assistants(None)
        version = await self._repository.assistant_version(assistant.id)
        prefix = await self._repository.prefix(version.id, "t", [1, 2, 3])
        self._user, self._prefix = user.id, prefix.id
        acts = [self._ask] * 4 + [self._progress] * 2 + [self._end] * 6 + [self._come_back] * 2
        acts += [self._delete, self._purge] * 2 + [self._restart, self._collect]
        acts += [self._compact] * 3
        for _ in range(STEPS):
            await self._rng.choice(acts)()
        await self._close()

    # -- acts

    async def _ask(self) -> None:
        """A new chat, or a message in one: after its last answer or as another branch."""
        rng = self._rng
        text, ids = self._words(), self._ids(rng.choice([3, 20, 64, 150, 200]))
        if len(self._chats) < 3 or rng.random() < 0.4:
            [turn] = await self._repository.start_chat(
                self._user,
                self._prefix,
                "title",
                user_text=text,
                user_token_ids=ids,
                sampling={},
            )
            chat = _Chat(turn.chat_id, [(None, [])])
            self._chats.append(chat)
            before: list[int] = []
        else:
            chat = rng.choice(self._chats)
            if chat.running is not None:
                return
            parent, before = rng.choice(chat.leaves) if rng.random() < 0.3 else chat.leaves[-1]
            [turn] = await self._repository.start_turns(
                chat.id, parent_id=parent, user_text=text, user_token_ids=ids, sampling={}
            )
        self._recording.note(Stored(turn.user_message_id, chat.id, text, ids))
        chat.running, chat.path = turn, before + ids

    async def _progress(self) -> None:
        for chat in self._chats:
            if chat.running is not None:
                text, ids = self._answer(chat.running)
                half = ids[: len(ids) // 2]
                progress = Progress(
                    message_id=chat.running.message_id, text=text[:4], token_ids=half
                )
                await self._repository.save_progress([progress])
                message = chat.running.message_id
                self._recording.note(Stored(message, chat.id, text[:4], half, ended=False))

    async def _end(self) -> None:
        running = [chat for chat in self._chats if chat.running is not None]
        if not running:
            return
        chat = self._rng.choice(running)
        turn = chat.running
        assert turn is not None
        text, ids = self._answer(turn)
        assert await self._repository.finish_turn(
            turn.id,
            status="complete",
            finish_reason="eos",
            error=None,
            text=text,
            token_ids=ids,
            latency=None,
        )
        self._recording.note(Stored(turn.message_id, chat.id, text, ids))
        chat.running, chat.path = None, chat.path + ids
        chat.leaves.append((turn.message_id, chat.path))
        self._save(chat.id, chat.path)
        if self._rng.random() < 0.5:
            assert self._store.flush(30.0)

    def _save(self, chat_id: str, path: list[int]) -> None:
        ids = np.array(path, np.int32)
        for _ in range(self._rng.choice([0, 2, 4, 6])):  # as it grew: partial stripes, superseded
            save(self._store, f"c-{chat_id}", ids[: self._rng.randrange(1, len(ids) + 1)])
            if self._rng.random() < 0.5:
                assert self._store.flush(30.0)
        left = -(-len(ids) // 64)
        good = True

        def done(durable: bool) -> None:
            nonlocal left, good
            left -= 1
            good = good and durable
            if not left and good:
                self._recording.note(Saved(chat_id, ids))

        save(self._store, f"c-{chat_id}", ids, done=done)

    async def _come_back(self) -> None:
        if self._chats:
            chat = self._rng.choice(self._chats)
            _, ids = self._rng.choice(chat.leaves)
            restore(self._store, f"c-{chat.id}", np.array(ids, np.int32))

    async def _delete(self) -> None:
        resting = [chat for chat in self._chats if chat.running is None]
        if len(resting) < 2:
            return
        chat = self._rng.choice(resting)
        self._chats.remove(chat)
        self._recording.note(Deleting(chat.id, done=False))
        with self._doing("deletion"):
            await self._repository.delete_chat(self._user, chat.id)
        self._store.forget([f"c-{chat.id}"])
        assert self._store.flush(30.0)
        self._recording.note(Deleting(chat.id, done=True))

    async def _purge(self) -> None:
        with self._doing("purge"):
            await self._repository.purge_deleted(LATER)
            due = await self._repository.chats_to_forget()
            self._store.forget([f"c-{chat_id}" for chat_id in due])
            await self._repository.chats_forgotten(due)

    async def _compact(self) -> None:
        self._store.compact()

    async def _collect(self) -> None:
        save(self._store, "c-stale", np.array(self._ids(70), np.int32), fingerprint=b"weights-0")
        self._store.collect(FINGERPRINT)

    async def _restart(self) -> None:
        if self._rng.random() < 0.5:
            with self._doing("restart"):
                await self._close()
                await self._open()
                for chat in self._chats:
                    chat.running = None
                await self._repository.interrupt_running()

    # -- means

    async def _open(self) -> None:
        self._database = await Database.open(self._data / "rejoinder.db")
        self._repository = Repository(self._database)
        self._store = ChunkStore(self.dirs, self.cap, hook=self._step)

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        self._recording.note(Doing("database", what))
        yield
        self._recording.note(Doing("database", "messages"))

    def _step(self, name: str) -> None:
        """Called by the store's writer before each of its steps."""
        if name == "delete.commit":  # to make room, or since it was asked for
            what = "eviction" if self._step_before in ("reserve", "settle") else "forgetting"
            self._recording.note(Doing("store", what))
        elif name != "delete.unlink":
            what = STEPS_OF.get(name.partition(".")[0], "saving")
            self._recording.note(Doing("store", what))
        self._step_before = name

    async def _close(self) -> None:
        self._store.close()
        self.compactions += self._store.compactions
        self.evictions += self._store.evictions
        await self._database.close()

    def _answer(self, turn: Turn) -> tuple[str, list[int]]:
        """The same for a turn whenever it is asked for."""
        rng = random.Random(turn.message_id + "x")
        count = rng.choice([5, 30, 90])
        return f"answer {rng.random()}", [rng.randrange(49152) for _ in range(count)]

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(49152) for _ in range(count)]

    def _words(self) -> str:
        return f"question {self._rng.random()} " * self._rng.choice([1, 5, 60])
