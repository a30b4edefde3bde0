"""Settings as options of the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from app.settings import (
    Settings,
    SettingsError,
    allowed,
    load_settings,
    option_name,
    unknown_variables,
)

F = TypeVar("F", bound=Callable[..., Any])


def setting_options(*names: str) -> Callable[[F], F]:
    """One option for each setting named, and --config for the file."""

    def decorate(command: F) -> F:
        for name in reversed(names):
            text = f"{Settings.model_fields[name].description} [{allowed(name)}]"
            command = click.option(
                option_name(name), name, metavar="VALUE", help=text.replace("`", "")
            )(command)
        path = click.Path(path_type=Path)
        return click.option(
            "--config", type=path, help="settings file, instead of rejoinder.toml in the data dir"
        )(command)

    return decorate


def load(options: dict[str, Any]) -> Settings:
    """Settings from options that were given; a bad one ends the program with its range."""
    config = options.pop("config", None)
    for variable in unknown_variables():
        click.echo(f"warning: {variable} is no setting; it is ignored", err=True)
    try:
        return load_settings({k: v for k, v in options.items() if v is not None}, config)
    except SettingsError as error:
        raise click.ClickException(str(error)) from error
