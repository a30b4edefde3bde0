"""The command line: `rejoinder serve`, `check`, `profile`, `plan`, `keys`, `users`, `db` ..."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from collections.abc import Iterator
from typing import Any

import click

from app.cli_options import load, setting_options
from app.cli_users import users
from app.data_lock import DataDirectoryBusy, lock_data_dir
from app.progress import StepFailed, run_command, step
from app.settings import Settings
from engine.errors import EngineError
from engine.profile.shapes import SHAPES
from sessions.errors import SessionsError
from sessions.migrate import expire_backups, is_outdated, require_current, upgrade

_MEASURED = (
    "data_dir",
    "model",
    "dtype",
    "weights",
    "threads",
    "checkpoint_dirs",
    "checkpoint_cap_mib",
)


@contextlib.contextmanager
def _locked(settings: Settings) -> Iterator[None]:
    try:
        with lock_data_dir(settings.data_dir):
            yield
    except DataDirectoryBusy as error:
        raise click.ClickException(str(error)) from error


@click.group()
@click.version_option(package_name="rejoinder")
def main() -> None:
    """Rejoinder: a self-hosted chat service whose chats come back as if you had never left."""


@main.command()
@click.option("--migrate", is_flag=True, help="bring an outdated database schema up to date")
@setting_options(*Settings.model_fields)
def serve(migrate: bool, **options: Any) -> None:
    """Serve until interrupted."""
    settings = load(options)
    from app.server import AddressUnusable, run_server
    from app.tracing import TracesUnavailable

    with _locked(settings):
        try:
            if migrate:
                upgrade(settings.database_path, settings.backup_dir, click.echo)
            require_current(settings.database_path)
            expire_backups(settings.backup_dir)
            run_server(settings)
        except (AddressUnusable, SessionsError, EngineError, TracesUnavailable) as error:
            raise click.ClickException(str(error)) from error


@main.command()
@click.option("--dev", is_flag=True, help="also what only tests need")
@setting_options("data_dir", "model")
def setup(dev: bool, **options: Any) -> None:
    """Bring front-end files, the embedded model and the database schema up to date."""
    settings = load(options)
    from app.setup_assets import set_up_assets
    from app.setup_model import set_up_embedded_model

    try:
        with step("front-end files") as progress:
            set_up_assets(progress, dev=dev)
        if dev or settings.model == "embedded":
            with step("the embedded model") as progress:
                set_up_embedded_model(settings.data_dir, progress)
        with step("compiling the kernels") as progress:
            run_command([sys.executable, "-m", "kernels.warm_up"], progress)
    except StepFailed as error:
        raise click.ClickException(str(error)) from error
    _upgrade(settings)


@main.command()
@click.option("--repair", is_flag=True, help="put right what can be, dropping doubtful checkpoints")
@setting_options("data_dir", "checkpoint_dirs", "checkpoint_cap_mib")
def check(repair: bool, **options: Any) -> None:
    """Check database, index and checkpoint files of a stopped server against each other.

    Ends with status 1 when something is wrong and was not put right.
    """
    settings = load(options)
    from app.check import check_data
    from sessions.chunks import ChunkStoreError

    with _locked(settings):
        try:
            require_current(settings.database_path)
            findings = check_data(settings, repair=repair)
        except (SessionsError, ChunkStoreError, OSError, sqlite3.Error) as error:
            raise click.ClickException(str(error)) from error
    for fact in findings.facts:
        click.echo(fact)
    for fault in findings.faults:
        click.echo(f"wrong: {fault}")
    for fixed in findings.fixed:
        click.echo(f"put right: {fixed}")
    if findings.clean:
        click.echo("all is well")
    elif not repair:
        click.echo("--repair puts checkpoints right")
    sys.exit(0 if findings.clean else 1)


@main.command()
@click.option("--again", is_flag=True, help="measure all of it anew")
@setting_options(*_MEASURED)
def profile(again: bool, **options: Any) -> None:
    """Show what this machine can do with the model: disk, layers, shared reads of prefixes.

    What was not measured yet is measured now, which takes some seconds.
    """
    settings = load(options)
    from app.planning import measured, profile_lines

    try:
        found = measured(settings, lambda line: click.echo(line, err=True), again=again)
    except EngineError as error:
        raise click.ClickException(str(error)) from error
    click.echo("\n".join(profile_lines(found)))


@main.command()
@click.option(
    "--tokens",
    type=click.IntRange(1, 1 << 20),
    default=2048,
    show_default=True,
    help="length of the chat, without what it shares",
)
@click.option(
    "--prefix",
    type=click.IntRange(0, 1 << 20),
    default=0,
    show_default=True,
    help="tokens of the shared prefix before it",
)
@click.option(
    "--disk-mbps",
    type=click.FloatRange(0.1, 1e6),
    help="speed of reads, 10^6 bytes a second; otherwise as measured",
)
@click.option(
    "--geometry",
    type=click.Choice(tuple(SHAPES)),
    help="a model's shape, with costs scaled from this machine's",
)
@click.option(
    "--ttft-ms",
    type=click.FloatRange(0.001, 1e9),
    help="the smallest checkpoint with the first token within this time, "
    "instead of the fastest restore",
)
@setting_options(*_MEASURED, "checkpoint_bits")
def plan(
    tokens: int,
    prefix: int,
    disk_mbps: float | None,
    geometry: str | None,
    ttft_ms: float | None,
    **options: Any,
) -> None:
    """Show what is saved of a chat's layers, beside the pure methods, and why.

    Of each layer either nothing is saved (it runs again from the tokens), or its hidden states
    (half as large as K/V in models with as many KV heads as heads), or its K/V. Reads and compute
    overlap, so the best mix keeps both equally busy.
    """
    settings = load(options)
    from app.planning import Question, measured, plan_lines

    try:
        found = measured(settings, lambda line: click.echo(line, err=True))
        bits = settings.checkpoint_bits
        question = Question(tokens, prefix, disk_mbps, geometry, ttft_ms, bits)
        lines = plan_lines(found, question)
    except EngineError as error:
        raise click.ClickException(str(error)) from error
    click.echo("\n".join(lines))


@main.group()
def keys() -> None:
    """Keys of the API."""


@keys.command("create")
@click.argument("name")
@click.option("--user", "user_id", metavar="ID", help="whose key it is; otherwise a new user's")
@click.option(
    "--limit",
    "max_requests",
    type=click.IntRange(1, 65536),
    help="requests that the key may have at once; otherwise as many as its user may",
)
@setting_options("data_dir")
def keys_create(name: str, user_id: str | None, max_requests: int | None, **options: Any) -> None:
    """Make a key and show it, this once."""
    from app.api.key_admin import create_key

    settings = load(options)
    try:
        key, record = create_key(settings.database_path, name[:200], user_id, max_requests)
    except SessionsError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"key {record.id} of user {record.user_id}; it is shown this once:", err=True)
    click.echo(key)


@keys.command("list")
@setting_options("data_dir")
def keys_list(**options: Any) -> None:
    """List all keys, as far as they can be known again."""
    from app.api.key_admin import key_line, list_keys

    settings = load(options)
    try:
        found = list_keys(settings.database_path)
    except SessionsError as error:
        raise click.ClickException(str(error)) from error
    for key in found:
        click.echo(key_line(key))


@keys.command("revoke")
@click.argument("key_id")
@setting_options("data_dir")
def keys_revoke(key_id: str, **options: Any) -> None:
    """End a key, by its id in the list: requests with it are refused from now on."""
    from app.api.key_admin import revoke_key

    settings = load(options)
    try:
        revoked = revoke_key(settings.database_path, key_id)
    except SessionsError as error:
        raise click.ClickException(str(error)) from error
    if not revoked:
        raise click.ClickException(f"there is no valid key {key_id}; see `rejoinder keys list`")
    click.echo(f"key {key_id} is revoked")


@main.group()
def db() -> None:
    """The database."""


@db.command("upgrade")
@setting_options("data_dir")
def db_upgrade(**options: Any) -> None:
    """Create the database or bring its schema up to date, after a backup."""
    _upgrade(load(options))


def _upgrade(settings: Settings) -> None:
    path = settings.database_path
    try:
        if not is_outdated(path):
            click.echo(f"the database {path} has the current schema")
            return
        with _locked(settings):
            upgrade(path, settings.backup_dir, click.echo)
    except SessionsError as error:
        raise click.ClickException(str(error)) from error


main.add_command(users)


if __name__ == "__main__":
    main()
