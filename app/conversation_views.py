"""What the templates show of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from sessions.records import Message

NOTES = {
    "stopped": "You stopped this answer.",
    "interrupted": "This answer was interrupted.",
    "failed": "This answer failed.",
}
LONG_CHARS = 1_500  # of a user's message; longer ones are shown in part at first
LONG_LINES = 24
NEARLY_FULL = 0.8  # of the context, from where on the way on is shown


@dataclass(frozen=True, kw_only=True)
class Branch:
    """Which of the versions of a message is shown; "" where there is none before or after."""

    first: int
    last: int  # other than `first` where several are shown side by side
    total: int
    previous: str
    next: str

    @property
    def place(self) -> str:
        shown = f"{self.first}" if self.first == self.last else f"{self.first}–{self.last}"  # noqa: RUF001 - a range is written with it
        return f"{shown} / {self.total}"


@dataclass(frozen=True, kw_only=True)
class UserView:
    """A user's message as `fragments/user_message.html` shows it."""

    id: str
    text: str
    depth: int  # its number in the conversation
    branch: Branch | None = None
    kind: str = "user"

    @property
    def is_long(self) -> bool:
        return len(self.text) > LONG_CHARS or self.text.count("\n") >= LONG_LINES


@dataclass(frozen=True, kw_only=True)
class AnswerView:
    """One answer as `fragments/answer.html` shows it."""

    id: str
    chat_id: str
    status: str
    running: bool
    html: Markup
    depth: int = 0
    turn_id: str = ""
    phase: str = ""
    done: int = 0
    total: int = 0
    note: str = ""
    line: str = ""  # where its last turn's time went, in short
    retryable: bool = False
    continuable: bool = False
    branch: Branch | None = None
    number: int = 0  # among candidates, from 1; 0 for an answer alone
    chosen: bool = False  # of the candidates, the one that the chat goes on from
    kind: str = "answer"


@dataclass(frozen=True, kw_only=True)
class CandidatesView:
    """Answers side by side, as `fragments/candidates.html` shows them."""

    id: str  # of the group
    chat_id: str
    answers: Sequence[AnswerView]
    depth: int
    branch: Branch | None = None
    kind: str = "candidates"

    @property
    def running(self) -> bool:
        return any(answer.running for answer in self.answers)

    @property
    def turn_id(self) -> str:
        """Of any answer that runs."""
        return next(answer.turn_id for answer in self.answers if answer.running)

    @property
    def chosen(self) -> int:
        return next((answer.number for answer in self.answers if answer.chosen), 1)


Entry = UserView | AnswerView | CandidatesView


@dataclass(frozen=True, kw_only=True)
class QueuedView:
    """The message that waits; `problem` says why it waits for its user."""

    text: str
    problem: str


@dataclass(frozen=True, kw_only=True)
class ComposerView:
    """The parts of the composer that change with the chat: what comes next, and the gauge."""

    chat_id: str
    parent_id: str
    used: int  # tokens of the context
    limit: int
    running: bool
    queued: QueuedView | None = None
    empty: bool = False  # nothing to carry over

    @property
    def nearly_full(self) -> bool:
        return self.used >= NEARLY_FULL * self.limit and not self.empty


def branch_of(shown: Sequence[str], versions: Sequence[str]) -> Branch | None:
    """`shown` are neighbours among `versions`, all ids; None when there is nothing else to show."""
    if len(versions) <= len(shown):
        return None
    first, last = versions.index(shown[0]), versions.index(shown[-1])
    return Branch(
        first=first + 1,
        last=last + 1,
        total=len(versions),
        previous=versions[first - 1] if first else "",
        next=versions[last + 1] if last + 1 < len(versions) else "",
    )


def note_of(message: Message) -> str:
    """Why an answer has ended where it did, when the model did not end it."""
    if message.error:
        return message.error
    if message.finish_reason == "length":
        return "The answer reached the length limit."
    return NOTES.get(message.status, "")
