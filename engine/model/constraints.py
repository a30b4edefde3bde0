"""Answers that must match a grammar: tokens that would leave it are never chosen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from engine.model.sampler import Row
from engine.model.tokenizer import ChatTokenizer

COMPILED_KEPT = 32


class Grammars:
    """Compiled grammars for one vocabulary, the latest kept. Engine thread only."""

    def __init__(
        self, tokenizer: ChatTokenizer, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        """`vocab_size` is that of a row of logits, which may be padded."""
        self._chat_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def prepare(self) -> LLTokenizer:
        """The vocabulary as grammars need it; making it takes a fifth of a second, once."""
        if self._tokenizer is None:
            pieces = _Pieces(self._chat_tokenizer, self._vocab_size, self._eos[0])
            self._tokenizer = LLTokenizer(
                TokenizerWrapper(pieces), n_vocab=self._vocab_size, eos_token=list(self._eos)
            )
        return self._tokenizer

    def constraint(self, grammar: str) -> Constraint:
        """A fresh constraint at the grammar's start. Raises ValueError if it is not valid."""
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = LLMatcher(self.prepare(), grammar, log_level=0)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
            self._compiled[grammar] = matcher
            if len(self._compiled) > COMPILED_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return Constraint(matcher.deep_copy(), self._vocab_size, self._eos)


class Constraint:
    """Where one answer stands in its grammar; owned by its request."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos: list[int]) -> None:
        self._matcher = matcher
        self._eos = eos
        self._mask = allocate_token_bitmask(1, vocab_size)

    def push(self, token_id: int) -> None:
        """One more token of the answer, one that `apply` left."""
        self._matcher.consume_token(token_id)

    @property
    def fault(self) -> str:
        """Why the grammar was given up, by limits on its size for example; "" while it holds."""
        return self._matcher.get_error()

    def apply(self, row: Row) -> None:
        """Take the tokens that would leave the grammar to minus infinity; `row` is written.

        With a `fault` only the end of the answer is left.
        """
        fill_next_token_bitmask(self._matcher, self._mask, 0)
        bits = np.unpackbits(self._mask[0].view(np.uint8), bitorder="little", count=len(row))
        row[bits == 0] = -np.inf
        if self._matcher.is_error() or not np.isfinite(row.max()):
            row[:] = -np.inf
            row[self._eos] = 0.0


class _Pieces:
    """A vocabulary as the grammar library wants it: bytes by id, and its own tokenisation."""

    bos_token_id = None

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.bytes_of(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [i for i, piece in enumerate(self.tokens) if not piece]

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("only text is encoded")  # so the library learns it, by trying bytes
        return self._tokenizer.encode_text(text)
