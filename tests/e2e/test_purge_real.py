"""A deleted chat leaves no trace in any file, engine's checkpoints included: the real server."""

from __future__ import annotations

import contextlib
import sqlite3
import struct
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from app.history.purger import UNDO
from sessions.migrate import upgrade
from tests.app.web_client import Browser
from tests.e2e.server_process import ServerProcess

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

RUN = "from app.cli import main; main()"
WORDS = "Xylotriquet ꙮ meadowlark quarrelled"
WAIT_S = 240


def traces(data_dir: Path, chat_id: str, ids: list[int]) -> set[str]:
    """What of the chat is in which file: its words, its id, a run of its token ids."""
    marks = {
        "words": b"Xylotriquet",
        "trigram": "ꙮ".encode(),
        "id": chat_id.encode(),
        "id in binary": bytes.fromhex(chat_id),
        "tokens": struct.pack("<6i", *ids[20:26]),
        "tokens, wide": struct.pack("<6q", *ids[20:26]),
    }
    found = set()
    for path in sorted(data_dir.rglob("*")):
        data = b""
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # it may just have gone
            data = path.read_bytes()
        name = path.relative_to(data_dir)
        found |= {f"{mark} in {name}" for mark, raw in marks.items() if raw in data}
    return found


async def until(condition: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
    end = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < end, what
        await anyio.sleep(0.25)


async def test_a_purged_chat_is_in_no_file(tmp_path: Path, model_dir: Path) -> None:
    data = tmp_path / "data"
    path = data / "rejoinder.db"
    upgrade(path, data / "backups", lambda line: None)
    command = ["-c", RUN, "serve", "--port", "0", "--data-dir", str(data)]
    command += ["--model", str(model_dir), "--checkpoint-method", "kv", "--idle-evict-s", "1"]
    server = ServerProcess(command, tmp_path / "log", wait_s=WAIT_S)
    try:
        with closing(sqlite3.connect(path, timeout=20)) as db:
            db.execute("UPDATE assistant SET sampling = '{\"max_tokens\": 8}'")
            db.commit()

            def ended(count: int) -> bool:
                query = "SELECT count(*) FROM turn WHERE ended_at IS NOT NULL"
                return bool(db.execute(query).fetchone()[0] == count)

            def checkpoints() -> int:
                files = (data / "checkpoints").rglob("*")
                return sum(file.stat().st_size for file in files if file.is_file())

            async with Browser(server.url) as browser:
                kept = await browser.new_chat("A question that stays. " * 12)
                await until(lambda: ended(1), "the first answer ends")
                before = checkpoints()
                chat_id = await browser.new_chat(f"{WORDS}. " * 12)
                await until(lambda: ended(2), "the second answer ends")
                query = "SELECT token_ids FROM message WHERE chat_id = ? AND role = 'user'"
                [(raw,)] = db.execute(query, (chat_id,)).fetchall()
                ids = list(struct.unpack(f"<{len(raw) // 4}i", raw))
                await until(lambda: checkpoints() > before + 64 * 1000, "its state is saved", 60)
                seen = traces(data, chat_id, ids)
                assert any("rejoinder.db" in trace for trace in seen)
                assert any("checkpoints" in trace for trace in seen), seen

                await browser.get("/")
                await browser.post(f"/chats/{chat_id}/delete")
                page = (await browser.get(f"/chats/{kept}")).text
                assert chat_id in page, "it can be undone"
                await anyio.sleep(UNDO.total_seconds())
                await until(lambda: not traces(data, chat_id, ids), "nothing is left", 60)
                assert (await browser.get(f"/chats/{kept}")).status_code == 200
        assert traces(data, chat_id, ids) == set()
    finally:
        server.stop()
    assert traces(data, chat_id, ids) == set(), "after the end"
