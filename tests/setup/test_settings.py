"""Settings: precedence, ranges, and the README's table of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.settings import Settings, SettingsError, load_settings, settings_table, unknown_variables

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in unknown_variables():
        monkeypatch.delenv(name)
    for name in Settings.model_fields:
        monkeypatch.delenv(f"REJOINDER_{name.upper()}", raising=False)


def test_command_line_wins_over_environment_over_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rejoinder.toml").write_text("port = 1\nmax_batch = 2\nmax_queue = 3\n")
    monkeypatch.setenv("REJOINDER_PORT", "11")
    monkeypatch.setenv("REJOINDER_MAX_BATCH", "12")
    settings = load_settings({"port": "21", "data_dir": str(tmp_path)})
    assert (settings.port, settings.max_batch, settings.max_queue) == (21, 12, 3)
    assert settings.prefill_chunk == 512


def test_the_file_is_found_in_the_data_directory_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rejoinder.toml").write_text("threads = 5\n")
    monkeypatch.setenv("REJOINDER_DATA_DIR", str(tmp_path))
    assert load_settings().threads == 5


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("port", "70000", "0 to 65535"),
        ("port", "http", "0 to 65535"),
        ("max_batch", "0", "1 to 1024"),
        ("idle_evict_s", "nan", "above 0 to 1000000000"),
        ("idle_evict_s", "0", "above 0 to 1000000000"),
        ("dtype", "fp8", "auto, fp32, bf16"),
        ("allowed_hosts", " , ", "names, separated by commas, at least one"),
        ("kv_memory_mib", "-1", "0 to 4194304"),
        ("public_url", "chat.lan", "https:// or http://, a host, maybe a port, nothing after it"),
        (
            "public_url",
            "https://a.b/c",
            "https:// or http://, a host, maybe a port, nothing after it",
        ),
        ("trusted_proxies", "proxy", "addresses or networks, separated by commas"),
    ],
)
def test_a_bad_value_is_refused_with_name_value_and_range(
    name: str, value: str, allowed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    option = "--" + name.replace("_", "-")
    with pytest.raises(SettingsError) as caught:
        load_settings({name: value, "data_dir": str(tmp_path)})
    assert str(caught.value) == f"{option}: {value!r} is not allowed; allowed: {allowed}"
    monkeypatch.setenv(f"REJOINDER_{name.upper()}", value)
    with pytest.raises(SettingsError) as caught:
        load_settings({"data_dir": str(tmp_path)})
    expected = f"REJOINDER_{name.upper()}: {value!r} is not allowed; allowed: {allowed}"
    assert str(caught.value) == expected


def test_every_fault_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('port = 99999\nprot = 1\ncheckpoint_method = "all"\n')
    with pytest.raises(SettingsError) as caught:
        load_settings({}, path)
    lines = str(caught.value).splitlines()
    assert f"port in {path}: '99999' is not allowed; allowed: 0 to 65535" in lines
    assert f"there is no setting 'prot' (in {path})" in lines
    assert len(lines) == 3


@pytest.mark.parametrize("content", [b"port = \n", b"\xff\xfe"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "own.toml").write_bytes(content)
    with pytest.raises(SettingsError, match=r"own\.toml is no valid TOML"):
        load_settings({}, tmp_path / "own.toml")


def test_a_file_that_was_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.toml cannot be read: No such file"):
        load_settings({}, tmp_path / "absent.toml")


def test_lists_come_as_text_or_as_toml_arrays(tmp_path: Path) -> None:
    (tmp_path / "rejoinder.toml").write_text('checkpoint_dirs = ["/ssd0", "/ssd1"]\n')
    settings = load_settings({"data_dir": str(tmp_path), "allowed_hosts": "chat.lan, localhost"})
    assert settings.checkpoint_dirs == (Path("/ssd0"), Path("/ssd1"))
    assert settings.allowed_hosts == ("chat.lan", "localhost")


def test_engine_config_has_bytes_and_absolute_paths(tmp_path: Path) -> None:
    model_dir = tmp_path / "models" / "some-model"
    options = {"data_dir": str(tmp_path), "kv_memory_mib": "32", "staging_mib": "8"}
    config = load_settings(options).engine_config(model_dir)
    assert config.kv_memory_bytes == 32 * 1024 * 1024
    assert config.staging_bytes == 8 * 1024 * 1024
    assert config.checkpoint_dirs == (str(tmp_path.resolve() / "checkpoints"),)
    assert config.model_name == "some-model"
    off = load_settings({**options, "checkpoint_cap_mib": "0"}).engine_config(model_dir)
    assert off.checkpoint_dirs == ()


def test_weights_in_a_plain_format_are_the_dtype(tmp_path: Path) -> None:
    options = {"data_dir": str(tmp_path), "weights": "fp32"}
    assert load_settings(options).engine_config(tmp_path / "m").dtype == "fp32"
    with pytest.raises(SettingsError, match="--weights: 'fp32' is not allowed: the dtype is bf16"):
        load_settings({**options, "dtype": "bf16"})
    quantised = load_settings({**options, "weights": "int8", "dtype": "fp32"})
    assert quantised.engine_config(tmp_path / "m").weights == "int8"


def test_misspelled_variables_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REJOINDER_PROT", "1")
    monkeypatch.setenv("REJOINDER_PORT", "1")
    assert unknown_variables() == ["REJOINDER_PROT"]


def test_the_readme_shows_the_settings_as_they_are() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    begin, end = "<!-- settings table: begin -->\n", "\n<!-- settings table: end -->"
    table = readme.split(begin)[1].split(end)[0]
    assert table == settings_table()
