"""Starting on what a crash left: nothing acknowledged is lost, and no byte is wrong."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np

from sessions.chunks import ChunkStore
from sessions.database import Database
from sessions.repository import Repository
from tests.crash.life import ROOMY, Deleting, Event, Saved, Stored
from tests.sessions.chunk_support import assert_clean, bytes_on_disk, restore, save


class _Told:
    """What was acknowledged before the crash."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.messages: dict[str, Stored] = {}
        self.saved: dict[str, list[Saved]] = {}
        self.deleting: set[str] = set()
        self.deleted: set[str] = set()
        for event in events:
            match event:
                case Stored():
                    self.messages[event.message_id] = event
                case Saved():
                    self.saved.setdefault(event.chat_id, []).append(event)
                case Deleting():
                    (self.deleted if event.done else self.deleting).add(event.chat_id)


def judge_database(path: Path, events: Iterable[Event]) -> None:
    """SQLite's own checks, and every acknowledged message with its text and ids."""
    told = _Told(events)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        rows = {
            row[0]: row[1:] for row in db.execute("SELECT id, text, token_ids, status FROM message")
        }
    for message in told.messages.values():
        if message.chat_id in told.deleting:
            continue  # it may be purged
        assert message.message_id in rows, f"message {message.message_id} is lost"
        text, raw, status = rows[message.message_id]
        ids = np.frombuffer(raw, "<i4").tolist()
        if message.ended:
            assert (status, text, ids) == ("complete", message.text, message.ids)
        else:
            assert text.startswith(message.text)
            assert ids[: len(message.ids)] == message.ids


def judge_store(dirs: list[Path], cap: int, events: Iterable[Event]) -> None:
    """Restores give right bytes (compared one by one), all that was durable, and work goes on."""
    told = _Told(events)
    for directory in dirs:
        directory.mkdir(exist_ok=True)
    store = ChunkStore(dirs, cap)
    try:
        assert store.flush(30.0)
        assert store.bytes_used == bytes_on_disk(dirs) <= cap
        assert restore(store, "c-stale", np.arange(70, dtype=np.int32)) == 0
        for chat_id, saved in told.saved.items():
            for one in saved:
                back = restore(store, f"c-{chat_id}", one.ids)
                if chat_id in told.deleted:
                    assert back == 0, f"deleted chat {chat_id} came back"
                elif cap == ROOMY and chat_id not in told.deleting:
                    assert back == len(one.ids), f"{back} of {len(one.ids)} tokens of {chat_id}"
        longest = max((s.ids for many in told.saved.values() for s in many), key=len, default=None)
        if longest is not None:  # the next answer is saved and comes back
            ids = np.concatenate([longest[-100:], np.arange(40, dtype=np.int32)])
            save(store, "c-next", ids)
            assert store.flush(30.0)
            assert restore(store, "c-next", ids) == len(ids)
        # bytes are durable before the index names them: nothing has to be found bad
        assert store.stripes_rejected == 0
    finally:
        store.close()
    assert_clean(dirs)


async def judge_start(path: Path, events: Iterable[Event]) -> None:
    """The database opens as the server opens it, and a chat goes on."""
    told = _Told(events)
    database = await Database.open(path)
    try:
        repository = Repository(database)
        await repository.interrupt_running()
        chats = {
            message.chat_id
            for message in told.messages.values()
            if message.chat_id not in told.deleting
        }
        for chat_id in sorted(chats)[:2]:
            leaf = (await repository.path(chat_id))[-1]
            [turn] = await repository.start_turns(
                chat_id, parent_id=leaf.id, user_text="next", user_token_ids=[7], sampling={}
            )
            assert await repository.finish_turn(
                turn.id,
                status="complete",
                finish_reason="eos",
                error=None,
                text="the next answer",
                token_ids=[8],
                latency=None,
            )
            assert (await repository.path(chat_id))[-1].text == "the next answer"
    finally:
        await database.close()
