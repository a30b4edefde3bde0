"""Stop strings cut the answer at the same place however the text came."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.stop_strings import StopMatcher

# Two letters, so that stop strings overlap each other and themselves.
letters = st.text(alphabet="ab", max_size=30)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def cut_by_definition(text: str, stop: list[str]) -> tuple[str, bool]:
    """Look at every beginning of the text, shortest first, until one ends in a stop string."""
    for end in range(1, len(text) + 1):
        matches = [string for string in stop if text[:end].endswith(string)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


def run(pieces: list[str], stop: list[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stop)
    shown: list[str] = []
    for piece in pieces:
        safe, stopped = matcher.push(piece)
        shown.append(safe)
        assert matcher.stopped == stopped
        if stopped:
            return shown, True
    return [*shown, matcher.flush()], False


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(letters, max_size=12), stop=stops)
def test_cut_is_where_the_first_stop_string_is_complete(pieces: list[str], stop: list[str]) -> None:
    shown, stopped = run(pieces, stop)
    assert ("".join(shown), stopped) == cut_by_definition("".join(pieces), stop)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.text(alphabet="ab", max_size=3), max_size=12), stop=stops)
def test_nothing_is_held_back_without_need(pieces: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    seen = shown = ""
    for piece in pieces:
        safe, stopped = matcher.push(piece)
        seen, shown = seen + piece, shown + safe
        if stopped:
            return
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        if held:
            assert any(string.startswith(held) and string != held for string in stop)
        # Every longer end of what was seen begins no stop string.
        for start in range(len(shown)):
            assert not any(string.startswith(seen[start:]) for string in stop)


def test_a_stop_string_over_three_tokens_is_never_shown_in_part() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("Fine.\n") == ("Fine.", False)
    assert matcher.push("Us") == ("", False)
    assert matcher.push("er: what") == ("", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_a_false_start_is_shown_when_it_is_known_to_be_one() -> None:
    matcher = StopMatcher(["END", "END OF FILE"])
    assert matcher.push("E") == ("", False)
    assert matcher.push("NT") == ("ENT", False)
    assert matcher.push("EN") == ("", False)
    assert matcher.flush() == "EN"


@pytest.mark.parametrize("stop", [[], [""]])
def test_without_stop_strings_text_passes_at_once(stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    assert matcher.push("any text") == ("any text", False)
    assert matcher.flush() == ""
