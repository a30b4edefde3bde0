"""What a request can get wrong; `app.errors` says what each becomes over HTTP."""

from __future__ import annotations

from engine.errors import EngineUnavailable


class Fault(Exception):
    """Base of the application's own errors; the message can be shown to the user."""


class InvalidField(Fault):
    """A form field has a value that is not allowed; `text` tells the user which would be."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


class NoSuchPage(Fault):
    """There is no such chat, turn or message, or it is another user's: the two look the same."""

    def __init__(self) -> None:
        super().__init__("There is no such page.")


class ChatMoved(Fault):
    """The form was made for an earlier state of the chat: it went on elsewhere."""

    def __init__(self, chat_id: str) -> None:
        super().__init__("This chat went on in another tab or device since this page was loaded.")
        self.chat_id = chat_id


class NotRetryable(Fault):
    """Only the last answer can be tried again, and only when it was cut short."""

    def __init__(self, chat_id: str) -> None:
        super().__init__("Only the last answer can be tried again, and only when it was cut short.")
        self.chat_id = chat_id


class NotContinuable(Fault):
    """The model can go on only with the last answer, and only where something cut it short."""

    def __init__(self, chat_id: str) -> None:
        super().__init__(
            "Only the last answer can be gone on with, and only when it was cut short."
        )
        self.chat_id = chat_id


class WrongModel(Fault):
    """The chat's token ids are of another tokenizer than that of the model that is running."""

    def __init__(self, chat_id: str) -> None:
        super().__init__("This chat was made with another model; it can be read, not continued.")
        self.chat_id = chat_id


class WrongPassword(InvalidField):
    """Name and password do not belong together; which of them is wrong is not told."""


class TooManyTries(Fault):
    """Passwords were tried too often; `retry_after_s` says when the next try is possible."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__("There were too many tries.")
        self.retry_after_s = retry_after_s


class ServerDraining(EngineUnavailable):
    """The server is about to end and takes no new question."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__("The server is being restarted.")
        self.retry_after_s = retry_after_s
