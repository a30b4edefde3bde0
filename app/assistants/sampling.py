"""The sampling defaults of an assistant, from form fields and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from app.assistants.limits import MAX_STOP_CHARS, MAX_STOPS
from app.faults import InvalidField
from engine.messages import SamplingParams

MAX_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Number:
    """A numeric parameter, as a form shows it; an empty field leaves the server's default."""

    name: str
    label: str
    low: float
    high: float
    help: str
    whole: bool = False
    open_low: bool = False  # `low` itself is not allowed

    @property
    def default(self) -> str:
        return f"{getattr(SamplingParams(), self.name):g}"

    @property
    def step(self) -> str:
        return "1" if self.whole else "any"

    @property
    def allowed(self) -> str:
        low = f"above {self.low:g}" if self.open_low else f"{self.low:g}"
        return f"{low} to {self.high:,g}" if self.high < 1e5 else f"{low} or more"

    def parse(self, raw: str) -> float | int:
        """Raises InvalidField, which names the range."""
        try:
            value: float | int = int(raw) if self.whole else float(raw.replace(",", "."))
        except ValueError:
            value = math.nan
        if not self.low <= value <= self.high or (self.open_low and value == self.low):
            kind = "a whole number" if self.whole else "a number"
            raise InvalidField(
                self.name, f"{self.label}: {raw[:40]!r} is not {kind} from {self.allowed}."
            )
        return value


NUMBERS = (
    Number(
        name="temperature", label="Temperature", low=0, high=2,
        help="0 always takes the likeliest token",
    ),
    Number(
        name="top_p", label="Top-p", low=0, high=1, open_low=True,
        help="the likeliest tokens that make up this share",
    ),
    Number(
        name="max_tokens", label="Longest answer, tokens", low=1, high=MAX_TOKENS, whole=True,
        help="cut to what the context has left",
    ),
    Number(
        name="top_k", label="Top-k", low=0, high=100_000, whole=True,
        help="so many of the likeliest tokens; 0 takes all",
    ),
    Number(
        name="min_p", label="Min-p", low=0, high=1,
        help="tokens with this share of the chance of the likeliest one",
    ),
    Number(
        name="repetition_penalty", label="Repetition penalty", low=0, high=10, open_low=True,
        help="above 1 makes repeating less likely",
    ),
    Number(
        name="presence_penalty", label="Presence penalty", low=-2, high=2,
        help="for tokens that were there before",
    ),
    Number(
        name="frequency_penalty", label="Frequency penalty", low=-2, high=2,
        help="for each time that a token was there",
    ),
)  # fmt: skip


def parse_sampling(field: Callable[[str], str]) -> dict[str, Any]:
    """What the form's fields set. Raises InvalidField."""
    found: dict[str, Any] = {}
    for number in NUMBERS:
        raw = field(number.name).strip()
        if raw:
            found[number.name] = number.parse(raw)
    stops = [line for line in field("stop").replace("\r\n", "\n").split("\n") if line]
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise InvalidField(
            "stop",
            f"Stop strings: up to {MAX_STOPS} of up to {MAX_STOP_CHARS} characters, one a line.",
        )
    if stops:
        found["stop"] = stops
    return found


def sampling_fields(sampling: Mapping[str, Any]) -> dict[str, str]:
    """The form's fields for what is set."""
    fields = {name: f"{value:g}" for name, value in sampling.items() if name != "stop"}
    return {**fields, "stop": "\n".join(sampling.get("stop", ()))}


def sampling_line(sampling: Mapping[str, Any]) -> str:
    """What is set, in words; "" when nothing is."""
    labels = {number.name: number.label.split(",")[0].lower() for number in NUMBERS}
    parts = [f"{labels[n.name]} {sampling[n.name]:g}" for n in NUMBERS if n.name in sampling]
    if sampling.get("stop"):
        parts.append("stops at " + ", ".join(f"“{stop}”" for stop in sampling["stop"]))
    return "; ".join(parts)
