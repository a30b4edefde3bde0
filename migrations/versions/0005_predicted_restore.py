"""What a restore was predicted to take, and the plan of its layers in place of the server's."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("turn_latency", sa.Column("restore_predicted_ms", sa.Double()))
    op.execute("UPDATE turn_latency SET restore_plan = restore_method")
