"""Grammars of JSON texts, as clients describe them. Imports no torch: the app checks with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# As Python's json writes it. With free white space a model can go on for ever with blanks.
_SEPARATORS: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON texts that fit a JSON schema, for `Submit.grammar`.

    Raises ValueError, which says what of the schema is not valid or not supported.
    """
    # A hint of this name in the schema would override the options above.
    cleaned = {name: value for name, value in schema.items() if name != "x-guidance"}
    grammar: str = LLMatcher.grammar_from_json_schema(json.dumps(cleaned), overrides=_SEPARATORS)
    failed, notes = LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise ValueError(notes[0] if notes else "it is not valid")
    return grammar
