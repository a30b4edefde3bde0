"""Names, passwords and roles of users, where a login is, links that work once."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("user", sa.Column("name", sa.String(64)))
    op.add_column("user", sa.Column("name_key", sa.String(256)))
    op.add_column("user", sa.Column("password_hash", sa.String(256)))
    op.add_column(
        "user", sa.Column("is_operator", sa.Boolean(), nullable=False, server_default=sa.false())
    )
    op.add_column("user", sa.Column("disabled_at", sa.DateTime(timezone=True)))
    op.create_index("ix_user_name_key", "user", ["name_key"], unique=True)
    op.add_column("login", sa.Column("agent", sa.String(64), nullable=False, server_default=""))
    # SQLite adds a foreign key with its column only.
    op.execute('ALTER TABLE login ADD COLUMN guest_id VARCHAR(32) REFERENCES "user" (id)')
    op.create_index("ix_login_guest_id", "login", ["guest_id"])
    op.create_table(
        "account_link",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("token_hash", sa.String(128), nullable=False),
        sa.Column("user_id", sa.String(32)),
        sa.Column("for_operator", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name="pk_account_link"),
        sa.ForeignKeyConstraint(["user_id"], ["user.id"], name="fk_account_link_user_id"),
        sa.UniqueConstraint("token_hash", name="uq_account_link_token_hash"),
    )
    op.create_index("ix_account_link_user_id", "account_link", ["user_id"])
