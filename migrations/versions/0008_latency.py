"""How each turn ended and when its first token came; sums and histograms over intervals."""

from __future__ import annotations

import math

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

# As the program had them when this was written: seconds, and for how long they are kept.
LEVELS = {300: "-2 days", 3600: "-60 days", 86400: "-1000 years", 604800: "-1000 years"}
SUMMED = (
    "tokens_in",
    "tokens_out",
    "prefix_tokens",
    "prefix_restored_tokens",
    "prefix_computed_tokens",
    "resident_tokens",
    "restored_tokens",
    "recomputed_tokens",
    "new_tokens",
    "prefill_ms",
    "restore_ms",
    "restore_io_ms",
    "restore_compute_ms",
    "restore_bytes",
)
COUNTED = {
    "first_token": "first_token_ms",
    "between": "itl_p50_ms",
    "queue": "queue_ms",
    "restore": "CASE WHEN restored_tokens > 0 THEN restore_ms END",
    "prediction": "CASE WHEN restored_tokens > 0 AND restore_predicted_ms > 0"
    " THEN restore_ms / restore_predicted_ms * 100 END",
}
KIND = (
    "CASE WHEN turn_latency.turn_id IS NULL THEN 'unmeasured'"
    " WHEN restored_tokens > 0 THEN 'restored' WHEN recomputed_tokens > 0 THEN 'recomputed'"
    " WHEN resident_tokens > 0 THEN 'resident' ELSE 'first' END"
)
ENDED = "turn LEFT JOIN turn_latency ON turn_latency.turn_id = turn.id WHERE turn.running IS NULL"


def upgrade() -> None:
    op.add_column("turn", sa.Column("outcome", sa.String(16)))
    op.add_column("turn", sa.Column("first_token_ms", sa.Double()))
    op.add_column(
        "turn_latency",
        sa.Column("restored_from_memory", sa.Integer(), server_default="0", nullable=False),
    )
    op.add_column(
        "turn_latency",
        sa.Column("restore_spans", sa.JSON(), server_default="[]", nullable=False),
    )
    op.drop_index("ix_turn_chat_id", "turn")
    op.create_index("ix_turn_chat_id_created_at", "turn", ["chat_id", "created_at"])
    _make_tables()
    # Of an answer that was gone on with, the message tells the end of its last turn only.
    op.execute(
        "UPDATE turn SET first_token_ms ="
        " (SELECT COALESCE(server_ttft_ms, ttft_ms) FROM turn_latency WHERE turn_id = turn.id),"
        " outcome = CASE"
        " WHEN EXISTS (SELECT 1 FROM turn AS later WHERE later.message_id = turn.message_id"
        "  AND +later.created_at > turn.created_at) THEN CASE"
        "  WHEN EXISTS (SELECT 1 FROM turn_latency WHERE turn_id = turn.id) THEN 'stopped'"
        "  ELSE 'interrupted' END"
        " ELSE (SELECT CASE status WHEN 'running' THEN 'interrupted' ELSE status END"
        "  FROM message WHERE message.id = turn.message_id) END"
        " WHERE running IS NULL"
    )
    connection = op.get_bind().connection.dbapi_connection
    assert connection is not None
    connection.create_function("latency_bucket", 1, _bucket, deterministic=True)
    for level, kept in LEVELS.items():
        _sum_up(level, kept)


def _bucket(value: float) -> int:
    if value <= 0.01:
        return 0
    return min(320, max(0, math.ceil(8 * math.log2(value / 0.01))))


def _sum_up(level: int, kept: str) -> None:
    """What the program keeps from now on, of the turns that are there."""
    start = f"CAST(strftime('%s', turn.created_at) AS INTEGER) / {level} * {level}"
    recent = f"turn.created_at >= datetime('now', '{kept}')"
    without = "first_token_ms IS NULL AND outcome"
    predicted = "restored_tokens > 0 AND restore_predicted_ms IS NOT NULL"
    sums = ", ".join(f"COALESCE(SUM({name}), 0)" for name in SUMMED)
    op.execute(
        "INSERT INTO latency_sum (level, start, kind, method, turns, first_tokens, stopped, failed,"
        f" interrupted, silent, {', '.join(SUMMED)},"
        " predicted_turns, predicted_ms, predicted_took_ms, preemptions)"
        f" SELECT {level}, {start}, {KIND}, COALESCE(restore_method, ''), COUNT(*),"
        f" COUNT(first_token_ms), SUM({without} = 'stopped'), SUM({without} = 'failed'),"
        f" SUM({without} = 'interrupted'), SUM({without} = 'complete'), {sums},"
        f" COALESCE(SUM({predicted}), 0),"
        f" COALESCE(SUM(CASE WHEN {predicted} THEN restore_predicted_ms END), 0),"
        f" COALESCE(SUM(CASE WHEN {predicted} THEN restore_ms END), 0),"
        f" COALESCE(SUM(preemptions), 0) FROM {ENDED} AND {recent} GROUP BY 2, 3, 4"
    )
    for measure, value in COUNTED.items():
        op.execute(
            "INSERT INTO latency_count (level, measure, start, kind, bucket, turns)"
            f" SELECT {level}, '{measure}', {start}, {KIND}, latency_bucket({value}), COUNT(*)"
            f" FROM {ENDED} AND {recent} AND ({value}) IS NOT NULL GROUP BY 3, 4, 5"
        )


def _make_tables() -> None:
    whole = (
        "turns",
        "first_tokens",
        "stopped",
        "failed",
        "interrupted",
        "silent",
        "predicted_turns",
        "preemptions",
    )
    real = (*(one for one in SUMMED if one.endswith("_ms")), "predicted_ms", "predicted_took_ms")
    large = (one for one in SUMMED if not one.endswith("_ms"))
    op.create_table(
        "latency_sum",
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("method", sa.String(64), nullable=False),
        *(sa.Column(name, sa.Integer(), nullable=False) for name in whole),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in large),
        *(sa.Column(name, sa.Double(), nullable=False) for name in real),
        sa.PrimaryKeyConstraint("level", "start", "kind", "method", name="pk_latency_sum"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "latency_count",
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("measure", sa.String(16), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("bucket", sa.Integer(), nullable=False),
        sa.Column("turns", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint(
            "level", "measure", "start", "kind", "bucket", name="pk_latency_count"
        ),
        sqlite_with_rowid=False,
    )
