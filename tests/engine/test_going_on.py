"""An answer that was cut short and is gone on with is the answer that was never cut."""

from __future__ import annotations

from typing import Any

import pytest

from engine.messages import SamplingParams, Submit
from engine.model.output import OutputText
from tests.engine.harness import Harness, HarnessFactory, random_ids

PREFIX, QUESTION = random_ids(70, 1), random_ids(9, 2)
LENGTH = 40


def _go_on(harness: Harness, chat: str, answer: list[int], **sampling: Any) -> str:
    """Submit the rest of an answer as the application does."""
    request_id = f"rest of {chat} {len(answer)}"
    params = {"temperature": 0.0, **sampling, "max_tokens": LENGTH - len(answer)}
    history = [*QUESTION, *answer[:-1]]
    harness.engine.handle(
        Submit(
            request_id=request_id,
            chat_id=chat,
            prefix_ids=PREFIX,
            history_ids=history,
            history_computed=len(history),
            new_ids=answer[-1:],
            sampling=SamplingParams(**params),
            answered=len(answer),
        )
    )
    harness.run()
    return request_id


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 1.0, "seed": 5, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    ],
)
def test_ids_and_text_across_the_seam(
    make_engine: HarnessFactory, sampling: dict[str, Any]
) -> None:
    harness = make_engine()
    whole = harness.submit(QUESTION, prefix=PREFIX, max_tokens=LENGTH, **sampling)
    harness.run()
    ids, text = harness.ids(whole), harness.text(whole)
    assert len(ids) > 20
    for cut in range(1, len(ids)):
        begun = OutputText(harness.engine.tokenizer, ())
        certain = "".join(begun.push(token)[0] for token in ids[:cut])
        rest = _go_on(harness, "a", ids[:cut], **sampling)
        assert ids[:cut] + harness.ids(rest) == ids
        assert certain + harness.text(rest) == text


def test_a_stop_string_across_the_seam_ends_it(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    whole = harness.submit(QUESTION, prefix=PREFIX, max_tokens=LENGTH)
    harness.run()
    ids, text = harness.ids(whole), harness.text(whole)
    stop = text[9:13]
    assert text.index(stop) == 9
    stopped = harness.submit(QUESTION, chat="b", prefix=PREFIX, max_tokens=LENGTH, stop=(stop,))
    harness.run()
    end = len(harness.ids(stopped))
    assert harness.done(stopped).finish == "stop"
    for cut in range(1, end):
        begun = OutputText(harness.engine.tokenizer, (stop,))
        certain = "".join(begun.push(token)[0] for token in ids[:cut])
        rest = _go_on(harness, "b", ids[:cut], stop=(stop,))
        assert harness.done(rest).finish == "stop"
        assert certain + harness.text(rest) == text[:9]
        assert ids[:cut] + harness.ids(rest) == ids[:end]
