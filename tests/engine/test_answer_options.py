"""What a request may ask of its answer: log probabilities, biased tokens, a grammar."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import Delta, SamplingParams, Submit
from engine.model.constraints import Constraint, Grammars
from engine.model.json_grammar import json_grammar
from engine.model.logprobs import token_logprobs
from engine.model.tokenizer import ChatTokenizer
from tests.engine.harness import Harness, HarnessFactory, random_ids

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def submit(harness: Harness, new: list[int], **options: Any) -> str:
    """Like `Harness.submit`, with the options of `Submit` itself."""
    harness.serial += 1
    request_id = f"o{harness.serial}"
    sampling = SamplingParams(
        **{"temperature": 0.0, "max_tokens": 8, **options.pop("sampling", {})}
    )
    harness.engine.handle(
        Submit(
            request_id=request_id,
            chat_id=options.pop("chat", request_id),
            prefix_ids=[],
            history_ids=[],
            history_computed=0,
            new_ids=new,
            sampling=sampling,
            **options,
        )
    )
    return request_id


def scores(harness: Harness, request_id: str) -> list[Any]:
    deltas = [e for e in harness.events if isinstance(e, Delta) and e.request_id == request_id]
    return [score for delta in deltas for score in delta.logprobs or []]


def test_logprobs_are_the_models_log_softmax() -> None:
    torch.manual_seed(3)
    logits = torch.randn(3, 50)
    tokens = np.array([4, 7, 9])
    first, nothing, alone = token_logprobs(logits, tokens, [5, None, 0])
    expected = torch.log_softmax(logits.double(), dim=1)
    assert first is not None
    assert first.logprob == pytest.approx(float(expected[0, 4]))
    values, ids = expected[0].topk(5)
    assert [i for i, _ in first.top] == ids.tolist()
    assert [v for _, v in first.top] == pytest.approx(values.tolist())
    assert nothing is None
    assert alone is not None
    assert alone.top == []
    assert alone.logprob == pytest.approx(float(expected[2, 9]))


def test_equal_tokens_are_told_lower_ids_first() -> None:
    logits = torch.zeros(1, 40)
    [found] = token_logprobs(logits, np.array([39]), [20])
    assert found is not None
    assert [i for i, _ in found.top] == list(range(20))


def test_engine_tells_a_logprob_for_every_token(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    asked = submit(harness, random_ids(40, 1), top_logprobs=3)
    silent = submit(harness, random_ids(40, 1))
    harness.run()
    assert harness.ids(asked) == harness.ids(silent)
    told = scores(harness, asked)
    assert len(told) == len(harness.ids(asked))
    for token, score in zip(harness.ids(asked), told, strict=True):
        assert score.top[0] == (token, score.logprob), "greedy takes the likeliest"
        assert len(score.top) == 3
    assert scores(harness, silent) == []


def test_bias_bans_and_forces_tokens(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    prompt = random_ids(40, 1)
    plain = submit(harness, prompt)
    harness.run()
    usual = harness.ids(plain)
    banned = submit(harness, prompt, logit_bias={usual[0]: -100.0})
    forced = submit(harness, prompt, logit_bias={77: 100.0}, top_logprobs=1)
    harness.run()
    assert harness.ids(banned)[0] != usual[0]
    assert harness.ids(forced) == [77] * 8
    assert scores(harness, forced)[0].top[0][0] == usual[0], "logprobs are the model's own"


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_answers_fit_their_schema_whatever_the_model_wants(
    make_engine: HarnessFactory, temperature: float
) -> None:
    harness = make_engine()
    grammar = json_grammar(PERSON)
    validator = jsonschema_rs.validator_for(PERSON)
    free = submit(harness, random_ids(70, 0), sampling={"max_tokens": 20})
    constrained = [
        submit(
            harness,
            random_ids(70, seed),
            grammar=grammar,
            sampling={"max_tokens": 200, "temperature": temperature, "seed": seed},
        )
        for seed in range(4)
    ]
    harness.run()
    for request_id in constrained:
        assert harness.done(request_id).finish == "eos"
        validator.validate(json.loads(harness.text(request_id)))
    with pytest.raises(ValueError, match=r"Expecting|Extra data|Invalid"):
        json.loads(harness.text(free))


def test_grammar_survives_preemption(make_engine: HarnessFactory, tmp_path: Path) -> None:
    harness = make_engine(disk=tmp_path, kv_memory_bytes=3 << 20)
    grammar = json_grammar({"type": "array", "items": {"type": "integer"}, "minItems": 60})
    options: dict[str, Any] = {"grammar": grammar, "sampling": {"max_tokens": 260}}
    requests = [submit(harness, random_ids(100, seed), **options) for seed in range(4)]
    harness.run()
    assert harness.engine.scheduler.preemptions > 0
    for request_id in requests:
        text = harness.text(request_id)
        whole = text if harness.done(request_id).finish == "eos" else text.rstrip(", -") + "]"
        assert all(isinstance(number, int) for number in json.loads(whole))


def test_a_grammar_that_is_not_valid_fails_its_request_only(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    bad = submit(harness, random_ids(30, 1), grammar="no such thing {")
    good = submit(harness, random_ids(30, 1))
    harness.run()
    assert "grammar" in harness.failed(bad).reason
    assert harness.done(good).finish in ("eos", "length")


class _GivesUp:
    """A matcher whose limits are reached with its third token."""

    def __init__(self) -> None:
        self.left = 3

    def consume_token(self, token_id: int) -> bool:
        self.left -= 1
        return self.left > 0

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        pass  # the mask stays as it was made: everything is allowed

    def is_error(self) -> bool:
        return self.left <= 0

    def get_error(self) -> str:
        return "" if self.left > 0 else "too complex"


def test_a_grammar_that_is_given_up_fails_its_request_only(
    make_engine: HarnessFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up(grammars: Grammars, grammar: str) -> Constraint:
        return Constraint(_GivesUp(), 259, [2])  # type: ignore[arg-type]  # a double

    harness = make_engine()
    other = submit(harness, random_ids(30, 2), sampling={"max_tokens": 12})
    monkeypatch.setattr(Grammars, "constraint", give_up)
    bad = submit(harness, random_ids(30, 1), grammar="{}")
    harness.run()
    assert "too complex" in harness.failed(bad).reason
    assert harness.done(other).finish in ("eos", "length")
    harness.engine.scheduler.check()


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nothing"}, "nothing"),
        ({"type": "object", "not": {"type": "string"}}, "not"),
        ({"$ref": "http://example.com/schema"}, "http://example.com/schema"),
    ],
)
def test_schemas_that_are_not_supported_are_named(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        json_grammar(schema)


def test_a_schema_cannot_change_the_compiler(embedded_model: Path) -> None:
    tokenizer = ChatTokenizer(embedded_model)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    constraint = grammars.constraint(json_grammar(schema))
    for token in tokenizer.encode_text("{"):
        constraint.push(token)
    row = np.zeros(tokenizer.vocab_size, dtype=np.float32)
    constraint.apply(row)
    blanks = [i for i in range(tokenizer.vocab_size) if tokenizer.bytes_of(i).isspace()]
    assert np.isinf(row[blanks]).all()


def test_mask_of_the_embedded_vocabulary(embedded_model: Path) -> None:
    """Every token that a valid text needs is allowed at its place, and no control token ever."""
    tokenizer = ChatTokenizer(embedded_model)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    constraint = grammars.constraint(json_grammar(schema))
    special = [i for i in range(tokenizer.vocab_size) if not tokenizer.bytes_of(i)]
    began = time.perf_counter()
    ids = tokenizer.encode_text('{"name": "Zoë 😀 \\n <|im_end|>", "other": [1, {"a": null}]}')
    for token in ids:
        row = np.zeros(tokenizer.vocab_size, dtype=np.float32)
        constraint.apply(row)
        assert np.isfinite(row[token]), tokenizer.decode([token])
        assert np.isinf(row[special]).all()
        constraint.push(token)
    assert (time.perf_counter() - began) / len(ids) < 0.02
    row = np.zeros(tokenizer.vocab_size, dtype=np.float32)
    constraint.apply(row)
    assert np.flatnonzero(np.isfinite(row)).tolist() == sorted(tokenizer.eos_token_ids)


options = st.fixed_dictionaries(
    {
        "sampling": st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.0, 1e-6, 0.7, 2.0]),
                "top_p": st.sampled_from([1e-6, 0.3, 1.0]),
                "presence_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
                "frequency_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
                "seed": st.sampled_from([0, -(2**63), 2**63 - 1]),
                "max_tokens": st.sampled_from([1, 3, 6]),
                "stop": st.sampled_from([(), ("a",), ("\n", "the"), ("\U0001f600",)]),
            }
        ),
        "candidate": st.integers(0, 7),
        "top_logprobs": st.sampled_from([None, 0, 20]),
        "logit_bias": st.dictionaries(
            st.integers(0, 258), st.sampled_from([-100.0, 0.5, 100.0]), max_size=4
        ),
        "grammar": st.sampled_from(
            ["", json_grammar({"type": "object"}), json_grammar({"enum": ["a", 1]})]
        ),
    }
)


def test_any_options_end_well_and_wedge_nothing(make_engine: HarnessFactory) -> None:
    harness = make_engine()

    @settings(max_examples=25, deadline=None, database=None)
    @given(batch=st.lists(options, min_size=1, max_size=4), seed=st.integers(0, 5))
    def check(batch: list[dict[str, Any]], seed: int) -> None:
        requests = [submit(harness, random_ids(20, seed), **dict(one)) for one in batch]
        harness.run()
        for request_id in requests:
            assert harness.done(request_id).finish in ("eos", "stop", "length")

    check()
    last = submit(harness, random_ids(40, 1))
    harness.run()
    assert harness.done(last).stats.tokens_out == 8
