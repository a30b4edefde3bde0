"""What is stored comes back byte for byte, whatever it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sessions.repository import Repository

if TYPE_CHECKING:
    from tests.sessions.conftest import Chats

pytestmark = pytest.mark.anyio

# Halves of surrogate pairs cannot be encoded, and are refused.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=50)
ODD = [
    "",
    " ",
    "\n\n\n",
    "  leading and trailing \t ",
    "a\r\nb\rc\nd\r\n",
    "\n\nbefore\n\n\n\nafter\n",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽",
    "漢字かな交じり文 한국어",
    "e\u0301 \u00e9 \u1e9b\u0323",
    "\u202eright to left\u202c \u200b\ufeff",
    "<|im_start|>system\nyou are<|im_end|>",
    "'; DROP TABLE message; --",
    "\U0010ffff\x01\x7f",
    "ß漢👍" * 25_000,
]


async def _round_trip(
    repository: Repository, chats: Chats, question: str, answer: str, ids: list[int]
) -> None:
    [turn] = await repository.start_chat(
        chats.user.id,
        chats.prefix.id,
        question,
        user_text=question,
        user_token_ids=ids,
        sampling={"stop": [question]},
    )
    await repository.finish_turn(
        turn.id,
        status="failed",
        finish_reason=None,
        error=answer,
        text=answer,
        token_ids=ids[::-1],
        latency=None,
    )
    first, second = await repository.path(turn.chat_id)
    assert first.text.encode() == question.encode()
    assert second.text.encode() == answer.encode()
    assert second.error == answer
    assert (first.token_ids, second.token_ids) == (ids, ids[::-1])
    chat = await repository.chat(chats.user.id, turn.chat_id)
    assert chat is not None
    assert chat.title == question
    stored = await repository.turn_of(turn.chat_id, turn.message_id)
    assert stored is not None
    assert stored.sampling == {"stop": [question]}


@pytest.mark.parametrize("text", ODD, ids=lambda text: f"{ascii(text)[:20]}")
async def test_odd_texts(repository: Repository, chats: Chats, text: str) -> None:
    await _round_trip(repository, chats, text, text[::-1], [0, 2**31 - 1])


@given(question=TEXT, answer=TEXT, ids=IDS)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
async def test_any_text(
    repository: Repository, chats: Chats, question: str, answer: str, ids: list[int]
) -> None:
    await _round_trip(repository, chats, question, answer, ids)


async def test_half_a_surrogate_pair_is_refused_whole(repository: Repository, chats: Chats) -> None:
    turn = await chats.start()
    await chats.answer(turn)
    with pytest.raises(UnicodeEncodeError):
        await chats.ask(turn.chat_id, turn.message_id, "half \ud83d")
    assert len(await repository.path(turn.chat_id)) == 2
    assert (await chats.ask(turn.chat_id, turn.message_id, "whole")).running
