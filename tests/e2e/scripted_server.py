"""The real web application as a process, with an engine that says what the test wants.

`python tests/e2e/scripted_server.py DATA_DIR MODEL_DIR [PORT]`. A message "Repeat: TEXT" is
answered with TEXT; "Hold: PHASE" stays in that phase, 60 of 120 tokens done, until it is stopped,
which takes a while; any other one is answered with a long answer in markdown, a word at a time,
slowly for "Take your time". After "Break" the engine's next statistics fail, once. Of several
answers at once, all but the first begin with "Candidate" and their number.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from app.server import run_server
from app.settings import load_settings
from engine.client import Reservation, TurnStream
from engine.messages import (
    Delta,
    Done,
    EngineInfo,
    EngineStats,
    FinishReason,
    Phase,
    PrefixUse,
    Status,
    Submit,
    TurnStats,
    Warm,
)
from engine.model.tokenizer import ChatTokenizer
from engine.turn_stream import Places
from sessions.migrate import upgrade

REPEAT = "Repeat: "
HOLD = "Hold: "
SLOWLY = "Take your time"
BREAK = "Break"
PHASES: tuple[Phase, ...] = ("queued", "restoring", "reading")
PAUSE_S = 0.015
LONG_PAUSE_S = 0.15  # between words: the answer does not end before it is stopped
STOP_S = 1.0
LONG_ANSWER = """# An answer with everything

A paragraph with **bold**, *italic*, ~~struck~~ and `inline code`, and a
[link](https://example.org/page "its title").

1. first of an ordered list
2. second

- a point
  - and one below it
- another point

> A quotation of two
> lines.

| layer | bytes | method |
|:------|------:|:------:|
| 0     | 1,152 | kv     |
| 1     |   384 | hidden |

```python
def restore(chat: str, *, method: str = "auto") -> int:
    # Counts the tokens that come back.
    return sum(len(part) for part in load(chat) if part is not None)
```

""" + "\n\n".join(
    f"Paragraph {n} goes on for a while, so that the page has something to scroll." * 2
    for n in range(1, 9)
)


class ScriptedEngine:
    """What the app needs of an engine. Event loop only."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = ChatTokenizer(model_dir)
        self._places = Places(16)
        self._cancelled: set[str] = set()
        self._broken = False
        self._behind: dict[str, tuple[str, int]] = {}  # by chat its prefix: scope and tokens
        self._streams: dict[str, TurnStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    info = EngineInfo(
        model_name="scripted", family="llama", dtype="fp32", weights="fp32",
        num_layers=2, context_length=8192,
        vocab_size=49152, page_size=64, num_pages=100, bytes_per_token_kv=1536,
        bytes_per_token_checkpoint=1536, checkpoint_method="kv",
        checkpoint_reason="Scripted answers need none.", fingerprint="scripted", load_ms=1.0,
    )  # fmt: skip
    alive = True

    def reserve(self) -> Reservation:
        return self._places.take()

    def submit(self, turn: Submit, reservation: Reservation) -> TurnStream:
        stream = self._streams[turn.request_id] = TurnStream(turn.request_id)
        self._behind[turn.chat_id] = (turn.prefix_scope, len(turn.prefix_ids))
        task = asyncio.create_task(self._answer(turn, reservation, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _answer(self, turn: Submit, reservation: Reservation, stream: TurnStream) -> None:
        request = turn.request_id
        after_text = self._tokenizer.decode(self._tokenizer.user_ids("|", first=True)).split("|")[
            -1
        ]
        asked = self._tokenizer.decode(turn.new_ids).removesuffix(after_text)
        repeated = asked.partition(REPEAT)[2]
        said, pause_s = (repeated, 0.002) if repeated else (LONG_ANSWER, PAUSE_S)
        self._broken = BREAK in asked
        if SLOWLY in asked:
            pause_s = LONG_PAUSE_S
        if turn.candidate:
            said = f"Candidate {turn.candidate}. {said}"
        if turn.answered:  # an answer that is gone on with
            ids = [*turn.history_ids, *turn.new_ids][-turn.answered :]
            said = said.removeprefix(self._tokenizer.decode(ids))
        for phase in PHASES:
            stream.push(Status(request_id=request, phase=phase, done=60, total=120))
            held = asked.partition(HOLD)[2] == phase
            while held and request not in self._cancelled:
                await asyncio.sleep(pause_s)
            await asyncio.sleep(STOP_S if held else 4 * pause_s)
        count = 0
        finish: FinishReason = "eos"
        for piece in re.findall(r"\s*\S+\s*", said) or [said]:
            if request in self._cancelled:
                finish = "cancelled"
                break
            ids = self._tokenizer.encode_text(piece)
            count += len(ids)
            stream.push(Delta(request_id=request, token_ids=ids, text=piece))
            await asyncio.sleep(pause_s)
        stats = TurnStats(
            queue_ms=3.0, restore_ms=38.0 if turn.history_ids else 0.0, restore_io_ms=20.0,
            restore_compute_ms=10.0, restore_method="kv" if turn.history_ids else "",
            restore_plan="30 kv" if turn.history_ids else "", restore_predicted_ms=36.0,
            restore_bytes=len(turn.history_ids) * 1536, prefill_ms=41.0, ttft_ms=96.0,
            itl_p50_ms=31.0, itl_p95_ms=44.0, total_ms=900.0,
            tokens_in=len(turn.prefix_ids) + len(turn.history_ids) + len(turn.new_ids),
            tokens_out=count, prefix_tokens=len(turn.prefix_ids), resident_tokens=0,
            restored_tokens=turn.history_computed,
            recomputed_tokens=len(turn.history_ids) - turn.history_computed,
            new_tokens=len(turn.new_ids), batch_size=1.0,
        )  # fmt: skip
        reservation.release()
        stream.push(Done(request_id=request, finish=finish, stats=stats))

    async def cancel(self, request_id: str) -> None:
        if request_id in self._streams:
            self._cancelled.add(request_id)
            await self._streams[request_id].wait_ended()

    async def warm(self, warm: Warm) -> None:
        pass

    async def forget(self, chat_ids: Sequence[str]) -> None:
        pass

    async def collect(self, owners: Sequence[str]) -> None:
        pass

    async def stats(self) -> EngineStats:
        if self._broken:
            self._broken = False
            raise RuntimeError("the scripted engine was told to break")
        return EngineStats(
            running=len(self._tasks), waiting=0, restoring=0, resident_chats=1, prefix_nodes=1,
            pages_total=100, pages_free=80, steps=10, tokens_decoded=100, tokens_prefilled=50,
            tokens_restored=30, tokens_recomputed=0, prefix_tokens_shared=1000, preemptions=0,
            evictions=0, stripes_written=1, stripes_dropped=0, stripes_rejected=0, write_refusals=0,
            disk_bytes=1 << 20, disk_cap_bytes=1 << 30, last_step_age_ms=1.0,
            prefixes=self._prefixes(),
        )  # fmt: skip

    def _prefixes(self) -> tuple[PrefixUse, ...]:
        """As if every chat were in memory."""
        found: dict[str, list[int]] = {}
        for scope, length in self._behind.values():
            found.setdefault(scope, []).append(length)
        return tuple(
            PrefixUse(scope=scope, held_tokens=max(all_), chats=len(all_), chat_tokens=sum(all_))
            for scope, all_ in found.items()
        )

    def on_death(self, callback: Callable[[], None]) -> None:
        pass

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def main(data_dir: Path, model_dir: Path, port: str = "0") -> None:
    """Serve until a signal ends it, on a free port unless one is named."""
    settings = load_settings(
        {"data_dir": str(data_dir), "model": str(model_dir), "port": port, "drain_s": "0.2"}
    )
    upgrade(settings.database_path, settings.backup_dir, print)
    run_server(settings, ScriptedEngine(model_dir))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
