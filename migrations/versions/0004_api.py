"""Chats made by the API, its conversations, responses and kept states; keys with limits."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_key", sa.Column("hint", sa.String(16), nullable=False, server_default=""))
    op.add_column("api_key", sa.Column("max_requests", sa.Integer()))
    op.add_column(
        "chat", sa.Column("origin", sa.String(16), nullable=False, server_default="browser")
    )
    op.create_table(
        "api_conversation",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("user_id", sa.String(32), nullable=False),
        sa.Column("chat_id", sa.String(32)),
        sa.Column("leaf_id", sa.String(32)),
        sa.Column("items", sa.JSON(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_api_conversation"),
        sa.ForeignKeyConstraint(["user_id"], ["user.id"], name="fk_api_conversation_user_id"),
        sa.ForeignKeyConstraint(
            ["chat_id"], ["chat.id"], name="fk_api_conversation_chat_id", ondelete="SET NULL"
        ),
    )
    op.create_index("ix_api_conversation_user_id", "api_conversation", ["user_id"])
    op.create_index("ix_api_conversation_chat_id", "api_conversation", ["chat_id"])
    op.create_table(
        "api_response",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("user_id", sa.String(32), nullable=False),
        sa.Column("chat_id", sa.String(32), nullable=False),
        sa.Column("message_id", sa.String(32), nullable=False),
        sa.Column("num_inputs", sa.Integer(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_api_response"),
        sa.ForeignKeyConstraint(["user_id"], ["user.id"], name="fk_api_response_user_id"),
        sa.ForeignKeyConstraint(
            ["chat_id"], ["chat.id"], name="fk_api_response_chat_id", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["message_id"], ["message.id"], name="fk_api_response_message_id", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_api_response_user_id", "api_response", ["user_id"])
    op.create_index("ix_api_response_chat_id", "api_response", ["chat_id"])
    op.create_index("ix_api_response_message_id", "api_response", ["message_id"])
    op.create_table(
        "api_state",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("user_id", sa.String(32), nullable=False),
        sa.Column("chat_id", sa.String(32), nullable=False),
        sa.Column("prefix_ids", sa.LargeBinary(), nullable=False),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("computed", sa.Integer(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_api_state"),
        sa.ForeignKeyConstraint(["user_id"], ["user.id"], name="fk_api_state_user_id"),
    )
    op.create_index("ix_api_state_user_id", "api_state", ["user_id"])
    op.create_index("ix_api_state_chat_id", "api_state", ["chat_id"])
