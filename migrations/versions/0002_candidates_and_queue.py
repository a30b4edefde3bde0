"""Several answers at once to one question, continued answers, a queued message for each chat."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("message", sa.Column("group_id", sa.String(32)))
    op.add_column(
        "message", sa.Column("candidate", sa.Integer(), server_default="0", nullable=False)
    )

    op.add_column("chat", sa.Column("running_group_id", sa.String(32)))
    op.add_column("chat", sa.Column("carried", sa.JSON()))
    op.execute(
        "UPDATE chat SET running_group_id ="
        " (SELECT id FROM turn WHERE turn.chat_id = chat.id AND turn.running IS NOT NULL)"
    )
    op.create_index("uq_chat_id_running_group_id", "chat", ["id", "running_group_id"], unique=True)
    _rebuild_turn()
    op.create_table(
        "queued_message",
        sa.Column("chat_id", sa.String(32), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("problem", sa.Text()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("chat_id", name="pk_queued_message"),
        sa.ForeignKeyConstraint(
            ["chat_id"], ["chat.id"], name="fk_queued_message_chat_id", ondelete="CASCADE"
        ),
    )


def _rebuild_turn() -> None:
    """`running` becomes the group that runs, an answer may have several turns; all rows stay."""
    op.create_table(
        "turn_rebuilt",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("chat_id", sa.String(32), nullable=False),
        sa.Column("user_message_id", sa.String(32), nullable=False),
        sa.Column("message_id", sa.String(32), nullable=False),
        sa.Column("running", sa.String(32)),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name="pk_turn"),
        sa.ForeignKeyConstraint(["chat_id"], ["chat.id"], name="fk_turn_chat_id"),
        sa.ForeignKeyConstraint(
            ["chat_id", "running"],
            ["chat.id", "chat.running_group_id"],
            name="fk_turn_chat_id_running",
        ),
        sa.ForeignKeyConstraint(
            ["user_message_id"], ["message.id"], name="fk_turn_user_message_id"
        ),
        sa.ForeignKeyConstraint(["message_id"], ["message.id"], name="fk_turn_message_id"),
    )
    op.execute(
        "INSERT INTO turn_rebuilt"
        " (id, chat_id, user_message_id, message_id, running, sampling, created_at, ended_at)"
        " SELECT id, chat_id, user_message_id, message_id,"
        " CASE WHEN running IS NULL THEN NULL ELSE id END, sampling, created_at, ended_at FROM turn"
    )
    op.drop_table("turn")
    op.rename_table("turn_rebuilt", "turn")
    op.create_index("ix_turn_chat_id", "turn", ["chat_id"])
    op.create_index("ix_turn_user_message_id", "turn", ["user_message_id"])
    op.create_index("ix_turn_created_at", "turn", ["created_at"])
    op.create_index("ix_turn_message_id", "turn", ["message_id"])
    op.create_index(
        "ix_turn_running",
        "turn",
        ["running"],
        sqlite_where=sa.text("running IS NOT NULL"),
        postgresql_where=sa.text("running IS NOT NULL"),
    )
