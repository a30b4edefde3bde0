"""What is derived of messages and may be made again: their HTML, and where their state is found."""

from __future__ import annotations

from sqlalchemy import ForeignKey, LargeBinary, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from sessions.models.base import Base, reference


class RenderedAnswer(Base):
    """The finished HTML of an answer; `key` names the renderer and the text that it was made of."""

    __tablename__ = "rendered_answer"
    message_id: Mapped[str] = mapped_column(String(32), ForeignKey("message.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(64))
    html: Mapped[str] = mapped_column(Text)


class PathMark(Base):
    """A digest of the first tokens of a chat; the last of them is a token of this message."""

    __tablename__ = "path_mark"
    digest: Mapped[bytes] = mapped_column(LargeBinary, primary_key=True)
    message_id: Mapped[str] = mapped_column(
        String(32), ForeignKey("message.id"), primary_key=True, index=True
    )
    chat_id: Mapped[str] = reference("chat.id")
