"""Runs migrations on the connection that sessions.migrate opened."""

from __future__ import annotations

from alembic import context

from sessions.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite alters most tables only by copying them
)
with context.begin_transaction():
    context.run_migrations()
