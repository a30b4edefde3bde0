"""What people run, bf16 on the real model: a restore costs no more than a change of batch does.

For each format of the weights that a server may choose.

The measure is the KL divergence of next-token distributions from those of a never evicted chat,
beside the divergence that batching alone causes (other GEMM shapes round otherwise).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import choosing
from engine.model.sampler import sample
from engine.model.tokenizer import ChatTokenizer
from tests.engine.harness import Harness, HarnessFactory

SYSTEM = "You help people to cook with what they have at home. Answer in short, plain sentences."
TALK = [
    "What can I cook with rice, two eggs, an onion and some soy sauce?",
    "How long do I have to fry the rice, and should it be from yesterday?",
    "My pan is small. What do you suggest so that the rice does not get wet?",
]
PROBES = [
    "And for six people?",
    "Can I leave out the onion?",
    "Which oil is best?",
    "Is it good cold?",
    "How much salt?",
    "What should I drink with it?",
    "Write the steps as a list.",
    "How do I store the rest?",
]


@pytest.fixture
def factory(embedded_model: Path) -> Iterator[HarnessFactory]:
    made = HarnessFactory(embedded_model)
    yield made
    for harness in made.made:
        harness.close()


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every row of logits that was sampled from, in order."""
    rows: list[Tensor] = []

    def spy(values: Tensor, *args: object, **kwargs: object) -> object:
        rows.extend(values.clone())
        return sample(values, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(choosing, "sample", spy)
    return rows


class Talk:
    """The same conversation, answered by the model, for any number of chats."""

    def __init__(self, harness: Harness, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self.prefix = tokenizer.prefix_ids(SYSTEM)
        self.history: list[int] = []
        for turn, text in enumerate(TALK):
            new = tokenizer.user_ids(text, first=turn == 0)
            request = self.ask(harness, "origin", new, max_tokens=40)
            harness.run()
            self.history += new + harness.ids(request)

    def ask(self, harness: Harness, chat: str, new: list[int], max_tokens: int = 1) -> str:
        return harness.submit(
            new,
            chat=chat,
            prefix=self.prefix,
            history=self.history,
            computed=len(self.history),
            max_tokens=max_tokens,
        )

    def prime(self, harness: Harness, chats: list[str]) -> None:
        """Make exactly the history resident in each of these chats."""
        for chat in chats:
            harness.submit(
                self.history[-1:],
                chat=chat,
                prefix=self.prefix,
                history=self.history[:-1],
                max_tokens=1,
            )
        harness.run()

    def probe(self, harness: Harness, chats: list[str], together: bool) -> None:
        """One token for each probe, in a chat of its own, one by one or in one batch."""
        for chat, text in zip(chats, PROBES, strict=True):
            self.ask(harness, chat, self.tokenizer.user_ids(text, first=False))
            if not together:
                harness.run()
        harness.run()


def divergence(reference: list[Tensor], other: list[Tensor]) -> float:
    """Mean KL divergence in nats, by fp64."""
    assert len(reference) == len(other) == len(PROBES)
    values = []
    for p, q in zip(reference, other, strict=True):
        a, b = p.double().log_softmax(-1), q.double().log_softmax(-1)
        values.append(float((a.exp() * (a - b)).sum()))
    return statistics.mean(values)


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        ("hidden", "bf16"),
        ("kv", "bf16"),
        ("recompute", "bf16"),
        ("hidden", "int8"),
        ("hidden", "int4"),
        ("recompute", "int4"),
    ],
)
def test_restoring_costs_no_more_than_batching(
    factory: HarnessFactory,
    embedded_model: Path,
    logits: list[Tensor],
    tmp_path: Path,
    method: str,
    weights: str,
) -> None:
    harness = factory(
        disk=tmp_path,
        dtype="bf16",
        weights=weights,
        checkpoint_method=method,
        kv_memory_bytes=512 << 20,
    )
    tokenizer = ChatTokenizer(embedded_model)
    talk = Talk(harness, tokenizer)
    chats = [f"alone{i}" for i in range(len(PROBES))]
    others = [f"batched{i}" for i in range(len(PROBES))]
    talk.prime(harness, chats + others)
    logits.clear()
    talk.probe(harness, chats, together=False)
    alone = list(logits)
    logits.clear()
    talk.probe(harness, others, together=True)
    batched = divergence(alone, list(logits))
    before = [kv_of(harness, chat, len(talk.history)) for chat in chats]
    factory.close(harness)

    harness = factory(
        disk=tmp_path,
        dtype="bf16",
        weights=weights,
        checkpoint_method=method,
        kv_memory_bytes=512 << 20,
    )
    logits.clear()
    talk.probe(harness, chats, together=False)
    restored = divergence(alone, list(logits))
    assert restored <= 2 * batched + 1e-7, f"restored {restored}, batched {batched}"
    after = [kv_of(harness, chat, len(talk.history)) for chat in chats]
    if method == "kv":
        assert restored == 0
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def kv_of(harness: Harness, chat: str, num_tokens: int) -> Tensor:
    """K and V of a resident chat's first tokens, [layers, 2, tokens, heads, head_dim]."""
    (node,) = harness.engine.scheduler.tree.chats[chat].nodes()
    seq = node.seq
    slots = [page * 64 + offset for page in seq.page_ids for offset in range(64)][:num_tokens]
    return harness.engine.runner.decoder.cache.kv[:, :, slots].clone()
