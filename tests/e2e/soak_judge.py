"""What must be true after a soak: nothing lost, every answer right, all memory given back."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from tests.e2e.soak_clients import World

EOS = 2
PAGE = 64
# What a process may grow by from a third of its life on: a part of its size and some MiB, and more
# in the first minute, the less of it is left: allocators and caches fill up then.
WARM_S = 60
GROWTH_MIB = 32.0
WARMING_MIB = 256.0
GROWTH_PART = 0.05
NEEDED_FROM_S = 60.0  # a shorter soak need not see everything
NEEDED = (
    *("stop", "left mid-stream", "came back", "page", "edit", "again", "select", "warm"),
    *("connection lost", "answers after a restore", "engine: evictions", "engine: preemptions"),
    *("engine: tokens restored", "engine: tokens restored from host memory"),
    *("answers judged", "answers interrupted", "messages acknowledged"),
)
TIE = 5e-3  # of logits: below it either choice is right
# What a killed server's engine says when it ends after it, and what the test's own kill causes.
EXPECTED = re.compile(
    r"the app is gone and the engine did not end in time|the engine process \d+ ended with code -9"
)


@dataclass
class Verdict:
    """Figures, and what is wrong; nothing may be."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def judge_messages(database: Path, world: World, verdict: Verdict) -> None:
    """Every acknowledged message is there, and no end that somebody saw was taken back."""
    with closing(sqlite3.connect(database)) as db:
        texts: dict[str, Counter[str]] = {}
        for table in ("message", "queued_message"):
            for chat, text in db.execute(f"SELECT chat_id, text FROM {table}"):
                texts.setdefault(chat, Counter())[text] += 1
        status = dict(db.execute("SELECT id, status FROM message WHERE role = 'assistant'"))
        (verdict.counts["answers after a restore"], *tokens) = db.execute(
            "SELECT count(nullif(restored_tokens, 0)), sum(restored_tokens),"
            " sum(resident_tokens), sum(recomputed_tokens) FROM turn_latency"
        ).fetchone()
    for name, count in zip(("restored", "resident", "recomputed"), tokens, strict=True):
        verdict.counts[f"tokens {name}"] = count or 0
    for chat, said in world.said.items():
        if chat in world.deleted:
            continue
        verdict.counts["messages acknowledged"] += len(said)
        for text in said:
            if not texts.get(chat, Counter())[text]:
                verdict.wrong.append(f"a message of chat {chat} is lost: {text!r}")
    verdict.counts.update(f"answers {one}" for one in status.values())
    for message, one in status.items():
        if one == "running":
            verdict.wrong.append(f"answer {message} still runs")
        elif one == "interrupted" and message in world.ended:
            verdict.wrong.append(f"answer {message} had ended and is interrupted")


def judge_answers(database: Path, model_dir: Path, verdict: Verdict) -> None:
    """Each stored id is the choice of transformers after the stored ids before it (fp32, greedy).

    That is `generate`, one forward pass a branch; a choice between near ties may fall either way.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with closing(sqlite3.connect(database)) as db:
        db.row_factory = sqlite3.Row
        prefixes = {
            row["id"]: _ids(row["token_ids"])
            for row in db.execute(
                "SELECT c.id, p.token_ids FROM chat c JOIN prefix p ON p.id = c.prefix_id"
            )
        }
        rows = {row["id"]: dict(row) for row in db.execute("SELECT * FROM message")}
    parents = {row["parent_id"] for row in rows.values()}
    judged: set[str] = set()
    for leaf in sorted(rows.keys() - parents):
        path = [rows[leaf]]
        while path[0]["parent_id"] is not None:
            path.insert(0, rows[path[0]["parent_id"]])
        if all(row["role"] == "user" or row["id"] in judged for row in path):
            continue
        _judge_path(model, prefixes[path[0]["chat_id"]], path, judged, verdict)


@torch.inference_mode()
def _judge_path(
    model: Any,
    prefix: list[int],
    path: list[dict[str, Any]],
    judged: set[str],
    verdict: Verdict,
) -> None:
    ids = list(prefix)
    spans = []
    for row in path:
        own = _ids(row["token_ids"])
        if row["role"] == "assistant" and row["id"] not in judged:
            spans.append((row, len(ids), own))
        ids += own
    logits = model(torch.tensor([ids])).logits[0]
    for row, start, own in spans:
        judged.add(row["id"])
        verdict.counts["answers judged"] += 1
        verdict.counts["tokens judged"] += len(own)
        expected = [*own, EOS] if row["finish_reason"] == "eos" else own
        for at, token in enumerate(expected, start - 1):
            best = torch.topk(logits[at], 2)
            if int(best.indices[0]) == token:
                continue
            if float(best.values[0] - logits[at, token]) < TIE:
                verdict.counts["near ties"] += 1
            else:
                verdict.wrong.append(
                    f"answer {row['id']}, token {at - start + 1} of {len(own)}: {token}, "
                    f"not {int(best.indices[0])}"
                )
                break


def judge_log(log: Path, verdict: Verdict) -> None:
    """No entry that nobody meant to be written."""
    for line in log.read_text(errors="replace").splitlines():
        if " WARNING " in line:
            what = re.sub(r"[0-9a-f]{32}|\d+", "N", line.split(" WARNING ", 1)[1])
            verdict.counts[f"log: {what[:110]}"] += 1
        if re.search(r" (ERROR|CRITICAL) |Traceback", line):
            if EXPECTED.search(line):
                verdict.counts["log: errors that the kills explain"] += 1
            else:
                verdict.wrong.append(f"{log.name}: {line}")


def judge_pages(database: Path, total: int, free: int, verdict: Verdict) -> None:
    """With every chat idle, only prefixes of assistants hold pages."""
    with closing(sqlite3.connect(database)) as db:
        prefixes = [len(_ids(row[0])) for row in db.execute("SELECT token_ids FROM prefix")]
    verdict.counts["pages"] = total
    verdict.counts["pages free at the end"] = free
    held = total - free
    if held > sum(-(-tokens // PAGE) for tokens in prefixes):
        verdict.wrong.append(f"{held} pages are held, by prefixes of {prefixes} tokens")


def judge_memory(lives: list[list[tuple[float, float]]], verdict: Verdict) -> None:
    """Resident bytes of each process in each life: flat once it has warmed up.

    Samples are a second apart. The median of the sixth that follows the first third is compared
    with that of the last sixth.
    """
    for life, samples in enumerate(lives):
        sixth = len(samples) // 6
        if not sixth:
            continue
        allowed_mib = GROWTH_MIB + WARMING_MIB * max(0.0, 1 - 2 * sixth / WARM_S)
        for process, name in enumerate(("web", "engine")):
            before = median(one[process] for one in samples[2 * sixth : 3 * sixth]) / 2**20
            after = median(one[process] for one in samples[-sixth:]) / 2**20
            place = f"memory of the {name} process, life {life} of {len(samples)} s, MiB"
            verdict.counts[f"{place}: early"] = round(before)
            verdict.counts[f"{place}: late"] = round(after)
            if after > (1 + GROWTH_PART) * before + allowed_mib:
                verdict.wrong.append(f"{place}: it grew from {before:.0f} to {after:.0f}")


def judge_coverage(seconds: float, verdict: Verdict) -> None:
    """All that a soak is for happened."""
    if seconds >= NEEDED_FROM_S:
        verdict.wrong += [f"not one {name}" for name in NEEDED if not verdict.counts[name]]


def _ids(raw: bytes) -> list[int]:
    return [int(token) for token in np.frombuffer(raw, dtype="<i4")]
