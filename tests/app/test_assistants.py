"""The built-in assistants: well-formed, long enough to matter, and true to the settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from tokenizers import Tokenizer

from app.assistants.loader import builtin_assistants
from app.cli import main
from app.settings import Settings


def test_prompts_have_the_intended_lengths(embedded_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    lengths = {
        seed.slug: len(tokenizer.encode(seed.system_prompt, add_special_tokens=False).ids)
        for seed in builtin_assistants()
    }
    default, *_ = lengths
    assert default == "workbench"
    assert 900 <= lengths["workbench"] <= 1100
    assert 1800 <= lengths["rejoinder"] <= 2200
    assert lengths["plain"] <= 64


def test_assistants_are_complete_and_distinct() -> None:
    seeds = builtin_assistants()
    assert len(seeds) >= 3
    for field in ("slug", "name", "description", "greeting", "system_prompt"):
        values = [getattr(seed, field) for seed in seeds]
        assert all(values), field
        assert len(set(values)) == len(values), field
    for seed in seeds:
        assert "<|" not in seed.system_prompt
        assert seed.system_prompt == seed.system_prompt.strip()


def test_guide_names_settings_as_they_are() -> None:
    [guide] = [seed for seed in builtin_assistants() if seed.slug == "rejoinder"]
    named = set(re.findall(r"REJOINDER_([A-Z_]+[A-Z])", guide.system_prompt))
    assert len(named) > 10
    assert {name.lower() for name in named} <= set(Settings.model_fields)
    rows = re.findall(r"^\| `REJOINDER_(\w+)` \| .* \| (\S+) \|$", guide.system_prompt, re.M)
    assert len(rows) > 10
    for name, told in rows:
        default = Settings.model_fields[name.lower()].default
        if name == "ALLOWED_HOSTS":
            continue
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        assert told.strip("`") == shown, name


def test_guide_names_commands_that_exist() -> None:
    [guide] = [seed for seed in builtin_assistants() if seed.slug == "rejoinder"]
    commands = {" ".join(path) for path in _commands(main)}
    named = set(re.findall(r"`rejoinder ([a-z][a-z ]*[a-z])", guide.system_prompt))
    assert named >= {"serve", "db upgrade"}
    assert named <= commands


def _commands(group: click.Group) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from ((name, *rest) for rest in _commands(command))
        else:
            yield (name,)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("position", "place"), "place"),
        (("temperature", "heat"), "heat"),
        (("0.7", "'hot'"), "temperature"),
        (('name = "Plain"', "name = "), "invalid"),
    ],
)
def test_damaged_file_is_named(tmp_path: Path, change: tuple[str, str], complaint: str) -> None:
    source = Path(__file__).parents[2] / "app" / "assistants" / "plain.toml"
    damaged = source.read_text(encoding="utf-8").replace(*change)
    (tmp_path / "broken.toml").write_text(damaged, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"(?i)broken\.toml.*{complaint}"):
        builtin_assistants(tmp_path)
