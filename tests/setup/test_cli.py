"""The command line: refusals before anything listens, the lock, the check."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from app.cli import main
from app.data_lock import DataDirectoryBusy, lock_data_dir
from app.settings import Settings, option_name
from sessions.chunks import ChunkStore


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory with a database and no model."""
    target = tmp_path / "data"
    result = run("db", "upgrade", "--data-dir", str(target))
    assert result.exit_code == 0, result.output
    return target


def test_serve_has_an_option_for_every_setting() -> None:
    text = run("serve", "--help").output
    missing = [name for name in Settings.model_fields if option_name(name) not in text]
    assert missing == []


def test_a_bad_setting_ends_the_program_with_its_range(tmp_path: Path) -> None:
    result = run("serve", "--data-dir", str(tmp_path), "--max-batch", "many")
    assert result.exit_code == 1
    assert result.output == "Error: --max-batch: 'many' is not allowed; allowed: 1 to 1024\n"


def test_a_misspelled_variable_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REJOINDER_PROT", "1")
    result = run("db", "upgrade", "--data-dir", str(tmp_path))
    assert "warning: REJOINDER_PROT is no setting" in result.stderr
    assert result.exit_code == 0


def test_a_missing_schema_is_refused_with_the_command(tmp_path: Path) -> None:
    for command in (["serve"], ["check"]):
        result = run(*command, "--data-dir", str(tmp_path))
        assert result.exit_code == 1
        assert "has no schema yet" in result.output
        assert "run `rejoinder db upgrade`" in result.output
        assert not (tmp_path / "rejoinder.db").exists()


def test_an_outdated_schema_is_refused_with_the_command(data_dir: Path) -> None:
    with contextlib.closing(sqlite3.connect(data_dir / "rejoinder.db")) as db, db:
        db.execute("UPDATE alembic_version SET version_num = 'from-the-future'")
    result = run("serve", "--data-dir", str(data_dir))
    assert result.exit_code == 1
    assert "does not know" in result.output.replace("\n", " ")


def test_a_missing_model_is_refused_before_listening(data_dir: Path) -> None:
    result = run("serve", "--data-dir", str(data_dir))
    assert result.exit_code == 1
    assert "Error: the embedded model is missing in" in result.output
    assert "run `make setup`" in result.output
    assert "serves on" not in result.output


def test_an_unsupported_model_is_refused_before_listening(data_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["OPTForCausalLM"]}')
    (model / "tokenizer.json").write_text("{}")
    result = run("serve", "--data-dir", str(data_dir), "--model", str(model))
    assert result.exit_code == 1
    assert f"Error: the model in {model} cannot be used: its family is" in result.output
    assert "supported are LlamaForCausalLM, " in result.output


def test_migrating_first_makes_the_database(tmp_path: Path) -> None:
    result = run("serve", "--migrate", "--data-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "the embedded model is missing" in result.output
    assert (tmp_path / "rejoinder.db").exists()


def test_upgrading_twice_says_so(data_dir: Path) -> None:
    result = run("db", "upgrade", "--data-dir", str(data_dir))
    assert result.exit_code == 0
    assert "has the current schema" in result.output


@pytest.fixture
def other_process(data_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the data directory until it is killed."""
    program = (
        "import sys, pathlib\nfrom app.data_lock import lock_data_dir\n"
        "with lock_data_dir(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(data_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_server_on_one_data_directory_is_refused(
    data_dir: Path, other_process: subprocess.Popen[str]
) -> None:
    for command in ("serve", "check"):
        result = run(command, "--data-dir", str(data_dir))
        assert result.exit_code == 1
        assert f"is in use by process {other_process.pid}" in result.output


def test_a_killed_server_leaves_no_lock(
    data_dir: Path, other_process: subprocess.Popen[str]
) -> None:
    with pytest.raises(DataDirectoryBusy), lock_data_dir(data_dir):
        pass
    os.kill(other_process.pid, signal.SIGKILL)
    other_process.wait()
    with lock_data_dir(data_dir):
        pass


def test_check_of_sound_data(data_dir: Path) -> None:
    result = run("check", "--data-dir", str(data_dir))
    assert result.exit_code == 0, result.output
    assert "database: 0 chats, 0 messages" in result.output
    assert "all is well" in result.output


def test_check_finds_a_row_without_its_parent(data_dir: Path) -> None:
    with contextlib.closing(sqlite3.connect(data_dir / "rejoinder.db")) as db, db:
        db.execute(
            "INSERT INTO login (id, user_id, token_hash, created_at, last_seen_at) "
            "VALUES (?, ?, x'00', ?, ?)",
            ("a" * 32, "b" * 32, "2026-01-01 00:00:00", "2026-01-01 00:00:00"),
        )
    result = run("check", "--data-dir", str(data_dir))
    assert result.exit_code == 1
    assert "wrong: database: row 1 of login refers to a missing row of user" in result.output


def save_stripe(data_dir: Path, owner: str) -> Path:
    """A checkpoint of one stripe; returns its file."""
    directory = data_dir / "checkpoints"
    before = set(directory.rglob("*"))
    store = ChunkStore([directory], cap_bytes=1 << 24)
    done: list[bool] = []
    store.append(
        owner=owner,
        fingerprint=b"f" * 16,
        start=0,
        parent_digest=b"d" * 16,
        ids=np.arange(64, dtype=np.int32),
        chunks=[(0, "hidden", "fp32")],
        payload=[np.arange(4096, dtype=np.uint32).view(np.uint8)],
        done=done.append,
    )
    assert store.flush(10.0)
    assert done == [True]
    store.close()
    (path,) = (
        p
        for p in set(directory.rglob("*")) - before
        if p.suffix != ".sqlite3" and p.stat().st_size > 16384
    )
    return path


def test_check_forgets_the_state_of_chats_that_are_gone(data_dir: Path) -> None:
    gone = f"c-{'0' * 32}"
    path = save_stripe(data_dir, gone)
    kept = save_stripe(data_dir, "p-an-assistant")
    command = ("check", "--data-dir", str(data_dir))
    result = run(*command)
    assert result.exit_code == 1
    assert f"wrong: checkpoints: {gone} is of a chat that is gone" in result.output
    assert path.exists()
    result = run(*command, "--repair")
    assert result.exit_code == 0, result.output
    assert not path.exists()
    assert kept.exists()
    assert run(*command).exit_code == 0


def test_check_finds_a_flipped_byte(data_dir: Path) -> None:
    path = save_stripe(data_dir, "prefix-of-an-assistant")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    command = ("check", "--data-dir", str(data_dir))
    result = run(*command)
    assert result.exit_code == 1
    assert "1 of 1 stripes are damaged" in result.output
    assert "--repair puts checkpoints right" in result.output
    result = run(*command, "--repair")
    assert result.exit_code == 0, result.output
    assert "put right" in result.output
    assert run(*command).exit_code == 0
