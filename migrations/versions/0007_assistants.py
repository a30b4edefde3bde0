"""Assistants that people write: documents of a version, changes counted, deletion; bytes by chat.

The bytes of a chat's messages are kept by triggers, so that a page about all chats does not read
all messages. A later migration that copies `message` (a batch operation) drops its triggers: make
them again in it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

SIZE = "length(CAST({row}.text AS BLOB)) + length({row}.token_ids)"
STORAGE_TRIGGERS = (
    f"""
    CREATE TRIGGER chat_storage_insert AFTER INSERT ON message BEGIN
        INSERT INTO chat_storage (chat_id, messages, bytes)
            VALUES (NEW.chat_id, 1, {SIZE.format(row="NEW")})
            ON CONFLICT (chat_id) DO UPDATE
            SET messages = messages + 1, bytes = bytes + excluded.bytes;
    END
    """,
    f"""
    CREATE TRIGGER chat_storage_update AFTER UPDATE OF text, token_ids ON message BEGIN
        UPDATE chat_storage
            SET bytes = bytes + ({SIZE.format(row="NEW")}) - ({SIZE.format(row="OLD")})
            WHERE chat_id = NEW.chat_id;
    END
    """,
    f"""
    CREATE TRIGGER chat_storage_delete AFTER DELETE ON message BEGIN
        UPDATE chat_storage
            SET messages = messages - 1, bytes = bytes - ({SIZE.format(row="OLD")})
            WHERE chat_id = OLD.chat_id;
    END
    """,
)


def upgrade() -> None:
    op.add_column(
        "assistant", sa.Column("revision", sa.Integer(), nullable=False, server_default="1")
    )
    op.add_column("assistant", sa.Column("deleted_at", sa.DateTime(timezone=True)))
    op.create_table(
        "assistant_document",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("assistant_version_id", sa.String(32), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_assistant_document"),
        sa.ForeignKeyConstraint(
            ["assistant_version_id"],
            ["assistant_version.id"],
            name="fk_assistant_document_assistant_version_id",
        ),
    )
    op.create_index(
        "ix_assistant_document_assistant_version_id",
        "assistant_document",
        ["assistant_version_id"],
    )
    op.create_table(
        "chat_storage",
        sa.Column("chat_id", sa.String(32), nullable=False),
        sa.Column("messages", sa.Integer(), nullable=False),
        sa.Column("bytes", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("chat_id", name="pk_chat_storage"),
        sa.ForeignKeyConstraint(
            ["chat_id"], ["chat.id"], name="fk_chat_storage_chat_id", ondelete="CASCADE"
        ),
    )
    op.execute(
        "INSERT INTO chat_storage (chat_id, messages, bytes) "
        f"SELECT chat_id, count(*), sum({SIZE.format(row='message')}) FROM message "
        "GROUP BY chat_id"
    )
    for trigger in STORAGE_TRIGGERS:
        op.execute(trigger)
