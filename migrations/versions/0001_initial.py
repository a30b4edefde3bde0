"""Users, assistants, chats, messages, turns, their latency, settings."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "user",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_user"),
    )
    op.create_table(
        "login",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("user_id", sa.String(32), nullable=False),
        sa.Column("token_hash", sa.String(128), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name="pk_login"),
        sa.ForeignKeyConstraint(["user_id"], ["user.id"], name="fk_login_user_id"),
        sa.UniqueConstraint("token_hash", name="uq_login_token_hash"),
    )
    op.create_index("ix_login_user_id", "login", ["user_id"])
    op.create_table(
        "api_key",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("user_id", sa.String(32), nullable=False),
        sa.Column("key_hash", sa.String(128), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name="pk_api_key"),
        sa.ForeignKeyConstraint(["user_id"], ["user.id"], name="fk_api_key_user_id"),
        sa.UniqueConstraint("key_hash", name="uq_api_key_key_hash"),
    )
    op.create_index("ix_api_key_user_id", "api_key", ["user_id"])
    op.create_table(
        "assistant",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("slug", sa.String(100)),
        sa.Column("owner_id", sa.String(32)),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("greeting", sa.Text(), nullable=False),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("published", sa.Boolean(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_assistant"),
        sa.ForeignKeyConstraint(["owner_id"], ["user.id"], name="fk_assistant_owner_id"),
        sa.UniqueConstraint("slug", name="uq_assistant_slug"),
    )
    op.create_index("ix_assistant_owner_id", "assistant", ["owner_id"])
    op.create_table(
        "assistant_version",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("assistant_id", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("system_prompt", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_assistant_version"),
        sa.ForeignKeyConstraint(
            ["assistant_id"], ["assistant.id"], name="fk_assistant_version_assistant_id"
        ),
        sa.UniqueConstraint(
            "assistant_id", "number", name="uq_assistant_version_assistant_id_number"
        ),
    )
    op.create_table(
        "prefix",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("assistant_version_id", sa.String(32), nullable=False),
        sa.Column("tokenizer_digest", sa.String(128), nullable=False),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_prefix"),
        sa.ForeignKeyConstraint(
            ["assistant_version_id"],
            ["assistant_version.id"],
            name="fk_prefix_assistant_version_id",
        ),
        sa.UniqueConstraint(
            "assistant_version_id",
            "tokenizer_digest",
            name="uq_prefix_assistant_version_id_tokenizer_digest",
        ),
    )
    op.create_table(
        "chat",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("user_id", sa.String(32), nullable=False),
        sa.Column("prefix_id", sa.String(32), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("active_leaf_id", sa.String(32)),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_chat"),
        sa.ForeignKeyConstraint(["user_id"], ["user.id"], name="fk_chat_user_id"),
        sa.ForeignKeyConstraint(["prefix_id"], ["prefix.id"], name="fk_chat_prefix_id"),
        # SQLite lets a table refer to one that comes later.
        sa.ForeignKeyConstraint(["active_leaf_id"], ["message.id"], name="fk_chat_active_leaf_id"),
    )
    op.create_index("ix_chat_user_id_updated_at", "chat", ["user_id", "updated_at"])
    op.create_index("ix_chat_prefix_id", "chat", ["prefix_id"])
    op.create_index("ix_chat_active_leaf_id", "chat", ["active_leaf_id"])
    op.create_table(
        "message",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("chat_id", sa.String(32), nullable=False),
        sa.Column("parent_id", sa.String(32)),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("finish_reason", sa.String(32)),
        sa.Column("error", sa.Text()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("completed_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name="pk_message"),
        sa.ForeignKeyConstraint(["chat_id"], ["chat.id"], name="fk_message_chat_id"),
        sa.ForeignKeyConstraint(["parent_id"], ["message.id"], name="fk_message_parent_id"),
    )
    op.create_index("ix_message_chat_id", "message", ["chat_id"])
    op.create_index("ix_message_parent_id", "message", ["parent_id"])
    op.create_table(
        "turn",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("chat_id", sa.String(32), nullable=False),
        sa.Column("user_message_id", sa.String(32), nullable=False),
        sa.Column("message_id", sa.String(32), nullable=False),
        sa.Column("running", sa.Boolean()),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name="pk_turn"),
        sa.ForeignKeyConstraint(["chat_id"], ["chat.id"], name="fk_turn_chat_id"),
        sa.ForeignKeyConstraint(
            ["user_message_id"], ["message.id"], name="fk_turn_user_message_id"
        ),
        sa.ForeignKeyConstraint(["message_id"], ["message.id"], name="fk_turn_message_id"),
        sa.UniqueConstraint("message_id", name="uq_turn_message_id"),
    )
    op.create_index("ix_turn_chat_id", "turn", ["chat_id"])
    op.create_index("ix_turn_user_message_id", "turn", ["user_message_id"])
    op.create_index("ix_turn_created_at", "turn", ["created_at"])
    op.create_index(
        "uq_turn_running",
        "turn",
        ["chat_id"],
        unique=True,
        sqlite_where=sa.text("running IS NOT NULL"),
        postgresql_where=sa.text("running IS NOT NULL"),
    )
    op.create_table(
        "turn_latency",
        sa.Column("turn_id", sa.String(32), nullable=False),
        sa.Column("queue_ms", sa.Double(), nullable=False),
        sa.Column("restore_ms", sa.Double(), nullable=False),
        sa.Column("restore_io_ms", sa.Double(), nullable=False),
        sa.Column("restore_compute_ms", sa.Double(), nullable=False),
        sa.Column("restore_method", sa.String(64), nullable=False),
        sa.Column("restore_bytes", sa.Integer(), nullable=False),
        sa.Column("prefill_ms", sa.Double(), nullable=False),
        sa.Column("ttft_ms", sa.Double()),
        sa.Column("itl_p50_ms", sa.Double()),
        sa.Column("itl_p95_ms", sa.Double()),
        sa.Column("total_ms", sa.Double(), nullable=False),
        sa.Column("tokens_in", sa.Integer(), nullable=False),
        sa.Column("tokens_out", sa.Integer(), nullable=False),
        sa.Column("prefix_tokens", sa.Integer(), nullable=False),
        sa.Column("resident_tokens", sa.Integer(), nullable=False),
        sa.Column("restored_tokens", sa.Integer(), nullable=False),
        sa.Column("recomputed_tokens", sa.Integer(), nullable=False),
        sa.Column("new_tokens", sa.Integer(), nullable=False),
        sa.Column("batch_size", sa.Double(), nullable=False),
        sa.Column("prefix_restored_tokens", sa.Integer(), nullable=False),
        sa.Column("prefix_computed_tokens", sa.Integer(), nullable=False),
        sa.Column("preemptions", sa.Integer(), nullable=False),
        sa.Column("server_ttft_ms", sa.Double()),
        sa.Column("restore_plan", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("turn_id", name="pk_turn_latency"),
        sa.ForeignKeyConstraint(["turn_id"], ["turn.id"], name="fk_turn_latency_turn_id"),
    )
    op.create_table(
        "chat_to_forget",
        sa.Column("chat_id", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("chat_id", name="pk_chat_to_forget"),
    )
    op.create_table(
        "setting",
        sa.Column("key", sa.String(100), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_setting"),
    )
