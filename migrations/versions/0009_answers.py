"""The HTML of answers, and digests by which a prompt finds the chat that it goes on from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rendered_answer",
        sa.Column("message_id", sa.String(32), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("html", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["message_id"], ["message.id"], name="fk_rendered_answer_message_id"
        ),
        sa.PrimaryKeyConstraint("message_id", name="pk_rendered_answer"),
    )
    op.create_table(
        "path_mark",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("message_id", sa.String(32), nullable=False),
        sa.Column("chat_id", sa.String(32), nullable=False),
        sa.ForeignKeyConstraint(["message_id"], ["message.id"], name="fk_path_mark_message_id"),
        sa.ForeignKeyConstraint(["chat_id"], ["chat.id"], name="fk_path_mark_chat_id"),
        sa.PrimaryKeyConstraint("digest", "message_id", name="pk_path_mark"),
    )
    op.create_index("ix_path_mark_chat_id", "path_mark", ["chat_id"])
    # Deleting a message looks for what refers to it.
    op.create_index("ix_path_mark_message_id", "path_mark", ["message_id"])
