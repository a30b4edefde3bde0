"""Chats can be pinned, deleted with a way back, and imported; all texts can be searched.

The indices are FTS5 tables over trigrams, which find any run of three characters and more in any
script. They hold no text of their own, so an entry is removed by giving the same text again: only
the triggers write them. Two blanks end each indexed text, so that every character begins a
trigram and shorter terms are found through the list of trigrams.

A later migration that copies `chat` or `message` (a batch operation) drops their triggers: make
them again in it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

INDICES = ("message", "title")

MESSAGE_TRIGGERS = (
    """
    CREATE TRIGGER message_search_insert AFTER INSERT ON message
    WHEN NEW.status <> 'running' AND NEW.text <> '' BEGIN
        INSERT INTO search_entry (chat_id, message_id) VALUES (NEW.chat_id, NEW.id);
        INSERT INTO message_search (rowid, text)
            SELECT id, NEW.text || '  ' FROM search_entry WHERE message_id = NEW.id;
    END
    """,
    """
    CREATE TRIGGER message_search_update AFTER UPDATE OF status, text ON message
    WHEN NOT (OLD.status = 'running' AND NEW.status = 'running') BEGIN
        INSERT INTO message_search (message_search, rowid, text)
            SELECT 'delete', id, OLD.text || '  ' FROM search_entry WHERE message_id = OLD.id;
        DELETE FROM search_entry WHERE message_id = OLD.id;
        INSERT INTO search_entry (chat_id, message_id)
            SELECT NEW.chat_id, NEW.id WHERE NEW.status <> 'running' AND NEW.text <> '';
        INSERT INTO message_search (rowid, text)
            SELECT id, NEW.text || '  ' FROM search_entry WHERE message_id = NEW.id;
    END
    """,
    """
    CREATE TRIGGER message_search_delete AFTER DELETE ON message BEGIN
        INSERT INTO message_search (message_search, rowid, text)
            SELECT 'delete', id, OLD.text || '  ' FROM search_entry WHERE message_id = OLD.id;
        DELETE FROM search_entry WHERE message_id = OLD.id;
    END
    """,
)
# The plus keeps SQLite from going through all titles by the index of message ids.
TITLE_TRIGGERS = (
    """
    CREATE TRIGGER title_search_insert AFTER INSERT ON chat BEGIN
        INSERT INTO search_entry (chat_id) VALUES (NEW.id);
        INSERT INTO title_search (rowid, text)
            SELECT id, NEW.title || '  ' FROM search_entry
            WHERE chat_id = NEW.id AND +message_id IS NULL;
    END
    """,
    """
    CREATE TRIGGER title_search_update AFTER UPDATE OF title ON chat
    WHEN OLD.title <> NEW.title BEGIN
        INSERT INTO title_search (title_search, rowid, text)
            SELECT 'delete', id, OLD.title || '  ' FROM search_entry
            WHERE chat_id = OLD.id AND +message_id IS NULL;
        INSERT INTO title_search (rowid, text)
            SELECT id, NEW.title || '  ' FROM search_entry
            WHERE chat_id = OLD.id AND +message_id IS NULL;
    END
    """,
    """
    CREATE TRIGGER title_search_delete AFTER DELETE ON chat BEGIN
        INSERT INTO title_search (title_search, rowid, text)
            SELECT 'delete', id, OLD.title || '  ' FROM search_entry
            WHERE chat_id = OLD.id AND +message_id IS NULL;
        DELETE FROM search_entry WHERE chat_id = OLD.id AND +message_id IS NULL;
    END
    """,
)


def upgrade() -> None:
    _list()
    _search()


def _list() -> None:
    op.add_column(
        "chat", sa.Column("pinned", sa.Boolean(), nullable=False, server_default=sa.false())
    )
    op.add_column("chat", sa.Column("deleted_at", sa.DateTime(timezone=True)))
    op.add_column("chat", sa.Column("import_key", sa.String(64)))
    op.drop_index("ix_chat_user_id_updated_at", "chat")
    op.create_index(
        "ix_chat_listed",
        "chat",
        ["user_id", "pinned", "updated_at", "id"],
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )
    op.create_index(
        "ix_chat_deleted_at",
        "chat",
        ["deleted_at"],
        sqlite_where=sa.text("deleted_at IS NOT NULL"),
        postgresql_where=sa.text("deleted_at IS NOT NULL"),
    )
    op.create_index(
        "uq_chat_import_key",
        "chat",
        ["user_id", "import_key"],
        unique=True,
        sqlite_where=sa.text("import_key IS NOT NULL"),
        postgresql_where=sa.text("import_key IS NOT NULL"),
    )


def _search() -> None:
    op.create_table(
        "search_entry",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("chat_id", sa.String(32), nullable=False),
        sa.Column("message_id", sa.String(32)),
        sa.PrimaryKeyConstraint("id", name="pk_search_entry"),
        sa.UniqueConstraint("message_id", name="uq_search_entry_message_id"),
    )
    op.create_index("ix_search_entry_chat_id", "search_entry", ["chat_id"])
    for name in INDICES:
        op.execute(
            f"CREATE VIRTUAL TABLE {name}_search USING fts5(text, content='', tokenize='trigram')"
        )
        op.execute(f"CREATE VIRTUAL TABLE {name}_terms USING fts5vocab({name}_search, row)")
        # Two segments suffice to be merged, so that a purge can merge all in small steps.
        op.execute(f"INSERT INTO {name}_search ({name}_search, rank) VALUES ('usermerge', 2)")
    op.execute("INSERT INTO search_entry (chat_id) SELECT id FROM chat ORDER BY created_at")
    op.execute(
        "INSERT INTO title_search (rowid, text) SELECT entry.id, chat.title || '  ' "
        "FROM search_entry AS entry JOIN chat ON chat.id = entry.chat_id ORDER BY entry.id"
    )
    op.execute(
        "INSERT INTO search_entry (chat_id, message_id) SELECT chat_id, id FROM message "
        "WHERE status <> 'running' AND text <> '' ORDER BY created_at"
    )
    op.execute(
        "INSERT INTO message_search (rowid, text) SELECT entry.id, message.text || '  ' "
        "FROM search_entry AS entry JOIN message ON message.id = entry.message_id ORDER BY entry.id"
    )
    for trigger in (*MESSAGE_TRIGGERS, *TITLE_TRIGGERS):
        op.execute(trigger)
