"""The command line: `rejoinder users`. The server may run meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from app.cli_options import load, setting_options
from app.settings import Settings
from sessions.errors import SessionsError

if TYPE_CHECKING:
    from sessions.account_records import Account
    from sessions.records import User
    from sessions.repository import Repository

T = TypeVar("T")

_WHERE = ("data_dir", "host", "port", "allowed_hosts", "public_url")


@click.group()
def users() -> None:
    """Accounts of people, and invitations."""


@users.command("list")
@setting_options("data_dir")
def users_list(**options: Any) -> None:
    """List all accounts."""
    found = _run(load(options), lambda repository: repository.accounts())
    for account in found:
        click.echo(_line(account))
    if not found:
        click.echo("nobody has an account yet; see `rejoinder users invite --operator`", err=True)


@users.command("invite")
@click.option("--operator", is_flag=True, help="for an account that operates the server")
@click.option(
    "--days",
    type=click.IntRange(1, 365),
    default=7,
    show_default=True,
    help="how long the link works",
)
@setting_options(*_WHERE)
def users_invite(operator: bool, days: int, **options: Any) -> None:
    """Make a link with which one person makes an account, and show it, this once.

    Give --public-url, --host or --port as the server has them, where they are not in the
    environment or the settings file: they are the link's beginning.
    """
    from app.accounts.service import invite

    settings = load(options)
    lasts = timedelta(days=days)
    made = _run(settings, lambda repository: invite(repository, for_operator=operator, lasts=lasts))
    kind = "an operator's" if operator else "a member's"
    until = f"{made.record.expires_at:%Y-%m-%d %H:%M} UTC"
    click.echo(f"a link for {kind} account; it works once, until {until}:", err=True)
    click.echo(_base(settings) + made.path)


@users.command("disable")
@click.argument("name")
@setting_options("data_dir")
def users_disable(name: str, **options: Any) -> None:
    """Sign somebody out everywhere and refuse them, and their keys, from now on."""

    async def disable(repository: Repository) -> str:
        user = await _named(repository, name)
        await repository.disable_user(user.id)
        return str(user.name)

    click.echo(f"{_run(load(options), disable)} is disabled")


@users.command("enable")
@click.argument("name")
@setting_options("data_dir")
def users_enable(name: str, **options: Any) -> None:
    """Let somebody in again who was disabled."""

    async def enable(repository: Repository) -> str:
        user = await _named(repository, name)
        await repository.enable_user(user.id)
        return str(user.name)

    click.echo(f"{_run(load(options), enable)} is enabled")


@users.command("reset-password")
@click.argument("name")
@setting_options(*_WHERE)
def users_reset_password(name: str, **options: Any) -> None:
    """Make a link with which somebody sets a new password within a day, and show it, this once."""
    from app.accounts.service import offer_reset

    settings = load(options)

    async def reset(repository: Repository) -> str:
        user = await _named(repository, name)
        return (await offer_reset(repository, user.id)).path

    path = _run(settings, reset)
    click.echo("the link works once, for a day:", err=True)
    click.echo(_base(settings) + path)


async def _named(repository: Repository, name: str) -> User:
    from app.accounts.names import name_key

    user = await repository.user_by_name(name_key(name))
    if user is None:
        raise click.ClickException(f"there is no account {name!r}; see `rejoinder users list`")
    return user


def _line(account: Account) -> str:
    user = account.user
    seen = account.last_seen_at
    facts = [
        "operator" if user.is_operator else "member",
        "1 chat" if account.num_chats == 1 else f"{account.num_chats} chats",
        f"last seen {seen:%Y-%m-%d %H:%M} UTC" if seen else "signed in nowhere",
    ]
    if user.disabled_at is not None:
        facts.append(f"disabled {user.disabled_at:%Y-%m-%d %H:%M} UTC")
    return f"{user.name}  ({', '.join(facts)})"


def _base(settings: Settings) -> str:
    if settings.public_url:
        return settings.public_url
    host = settings.host if settings.host not in ("0.0.0.0", "::") else settings.allowed_hosts[0]
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def _run(settings: Settings, work: Callable[[Repository], Awaitable[T]]) -> T:
    from sessions.database import Database
    from sessions.repository import Repository

    async def run() -> T:
        database = await Database.open(settings.database_path)
        try:
            return await work(Repository(database))
        finally:
            await database.close()

    try:
        return asyncio.run(run())
    except SessionsError as error:
        raise click.ClickException(str(error)) from error
