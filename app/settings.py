"""Settings of the server: command line over environment over file, every value with its range."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from app.exposure import PublicAddress, TrustedProxies, needs_accounts
from app.logs import LogFormat
from engine.config import (
    CheckpointBits,
    CheckpointMethod,
    Device,
    DType,
    EngineConfig,
    WeightChoice,
)

ENV_PREFIX = "REJOINDER_"
CONFIG_NAME = "rejoinder.toml"
MIB = 1 << 20

LogLevel = Literal["debug", "info", "warning", "error"]


_SHAPES = {
    "public_url": "`https://` or `http://`, a host, maybe a port, nothing after it",
    "otlp_endpoint": "`http://` or `https://`, a host, maybe a port, nothing after it",
    "trusted_proxies": "addresses or networks, separated by commas",
}


class SettingsError(ValueError):
    """A setting is unknown or out of range; the message names setting, value and range."""


def _whole_number(value: Any) -> Any:
    """The environment and the command line give text."""
    return int(value) if isinstance(value, str) and value.strip().isdigit() else value


class Settings(BaseSettings):
    """Everything that an operator may set. Made by `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    data_dir: Path = Field(
        default=Path("data"), description="directory of database, models and checkpoints"
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(
        default=8000, ge=0, le=65535, description="port to listen on; 0 takes a free one"
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        default=("127.0.0.1", "localhost", "::1"),
        min_length=1,
        description="host names, without port, under which browsers may reach the server",
    )
    public_url: str = Field(
        default="",
        description="address that people type when it is not this machine's; "
        "its host is allowed, accounts are required",
    )
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = Field(
        default=("127.0.0.1", "::1"),
        description="with a public address: proxies that may say for whom they ask",
    )
    model: str = Field(
        default="embedded",
        min_length=1,
        description="`embedded`, a Hugging Face style directory, or a hub id",
    )
    device: Device = Field(
        default="auto", description="what runs the model; `auto` is `cuda` where torch finds one"
    )
    dtype: DType = Field(
        default="auto",
        description="element type of activations and KV; `auto` is bf16 where that is fast",
    )
    weights: WeightChoice = Field(
        default="auto",
        description="format of the weights; `auto` is the fastest that keeps the model's answers, "
        "as measured at a model's first start; `int4` needs a file made with 4 bits",
    )
    kv_memory_mib: int = Field(
        default=0,
        ge=0,
        le=1 << 22,
        description="memory for the KV cache, MiB; 0 is 1024 on a CPU, on a GPU what is free",
    )
    max_batch: int = Field(
        default=64, ge=1, le=1024, description="chats that are answered at the same time"
    )
    max_queue: int = Field(
        default=64, ge=0, le=65536, description="turns that may wait beyond those; then 429"
    )
    api_concurrency: int = Field(
        default=32, ge=1, le=1024, description="answers of one API user at the same time"
    )
    api_queue: int = Field(
        default=64,
        ge=0,
        le=65536,
        description="requests of one API user that may wait beyond those; then 429",
    )
    max_context: int = Field(
        default=0, ge=0, le=1 << 22, description="tokens of a chat; 0 is the model's own limit"
    )
    prefill_chunk: int = Field(
        default=512,
        ge=1,
        le=65536,
        description="prompt tokens read in one step, all chats together",
    )
    idle_evict_s: float = Field(
        default=600.0, gt=0, le=1e9, description="idle seconds after which a chat leaves memory"
    )
    share_prefix: Literal["auto", "always", "never"] = Field(
        default="auto", description="whether chats read their assistant's prompt together"
    )
    speculation: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="whether tokens are drafted from what the chat repeats, and verified; `auto` "
        "where that is measured to pay",
    )
    checkpoint_method: CheckpointMethod = Field(
        default="auto", description="what is saved of each layer, and how chats come back"
    )
    checkpoint_bits: Annotated[CheckpointBits, BeforeValidator(_whole_number)] = Field(
        default=16,
        description="bits of a number on disk; 16 is exact, fewer take less space and move "
        "answers a little",
    )
    checkpoint_dirs: Annotated[tuple[Path, ...], NoDecode] = Field(
        default=(),
        description="directories of checkpoints, best on several SSDs; "
        "none: `checkpoints` in the data directory",
    )
    checkpoint_cap_mib: int = Field(
        default=8192, ge=0, le=1 << 32, description="hard cap of all checkpoints, MiB; 0 saves none"
    )
    staging_mib: int = Field(
        default=256,
        ge=1,
        le=1 << 20,
        description="memory for checkpoints on their way to disk, MiB",
    )
    host_cache_mib: int = Field(
        default=256,
        ge=0,
        le=1 << 22,
        description="memory for checkpoints of chats that lately left the KV cache, MiB; 0 is none",
    )
    threads: int = Field(
        default=0, ge=0, le=1024, description="threads of the engine; 0 is one for each core"
    )
    max_message_chars: int = Field(
        default=100_000, ge=1, le=10_000_000, description="characters of one message"
    )
    drain_s: float = Field(
        default=10.0, ge=0, le=3600, description="seconds that running answers have at the end"
    )
    watchdog_s: float = Field(
        default=60.0,
        ge=0.5,
        le=3600,
        description="seconds without progress after which the engine is started again",
    )
    log_level: LogLevel = Field(default="info", description="least severe messages to log")
    log_format: LogFormat = Field(
        default="console", description="lines for people, or one JSON object a line"
    )
    otlp_endpoint: str = Field(
        default="",
        description="where OpenTelemetry traces of requests go (OTLP over HTTP); "
        "needs the extra `otel`",
    )

    @field_validator("public_url", "otlp_endpoint")
    @classmethod
    def _is_address(cls, value: str) -> str:
        return PublicAddress.parse(value).origin if value else value

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        TrustedProxies(value)
        return value

    @field_validator("allowed_hosts", "checkpoint_dirs", "trusted_proxies", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(item.strip() for item in value.split(",") if item.strip())
        return value

    @property
    def accounts_required(self) -> bool:
        """Whether people must sign in: unless only this machine reaches the server."""
        return needs_accounts(self.host, self.public_url)

    @property
    def engine_options(self) -> list[str]:
        """What the engine process is told on its command line, before its configuration."""
        log = ["--log-level", self.log_level, "--log-format", self.log_format]
        return [*log, "--threads", str(self.threads)]

    @field_validator("weights")
    @classmethod
    def _goes_with_dtype(cls, value: WeightChoice, found: ValidationInfo) -> WeightChoice:
        dtype = found.data.get("dtype", "auto")
        if value in ("fp32", "bf16") and dtype not in ("auto", value):
            raise ValueError(f"the dtype is {dtype}")
        return value

    @property
    def database_path(self) -> Path:
        return self.data_dir / "rejoinder.db"

    @property
    def profile_path(self) -> Path:
        """Where the measured figures of this machine are kept."""
        return self.data_dir / "profile.json"

    @property
    def backup_dir(self) -> Path:
        """Where copies of the database lie that were taken before an upgrade."""
        return self.data_dir / "backups"

    @property
    def chunk_dirs(self) -> tuple[Path, ...]:
        """Where checkpoints lie, whether or not new ones are saved."""
        return self.checkpoint_dirs or (self.data_dir / "checkpoints",)

    def _engine_dtype(self) -> DType:
        """Weights in fp32 or bf16 say the dtype where it is not set."""
        if self.dtype == "auto" and (self.weights == "fp32" or self.weights == "bf16"):
            return self.weights
        return self.dtype

    def engine_config(self, model_dir: Path) -> EngineConfig:
        """What the engine process is told; `model_dir` is what `resolve_model` returned."""
        saves = self.checkpoint_cap_mib > 0
        from_hub = model_dir.parent.name == "hub"
        return EngineConfig(
            model_dir=str(model_dir.resolve()),
            model_name=model_dir.name.replace("--", "/", 1) if from_hub else model_dir.name,
            device=self.device,
            dtype=self._engine_dtype(),
            weights=self.weights,
            kv_memory_bytes=self.kv_memory_mib * MIB,
            max_batch=self.max_batch,
            max_queue=self.max_queue,
            max_context=self.max_context,
            prefill_chunk=self.prefill_chunk,
            idle_evict_s=self.idle_evict_s,
            share_prefix=self.share_prefix,
            speculation=self.speculation,
            checkpoint_method=self.checkpoint_method,
            checkpoint_bits=self.checkpoint_bits,
            checkpoint_dirs=tuple(str(path.resolve()) for path in self.chunk_dirs) if saves else (),
            checkpoint_cap_bytes=self.checkpoint_cap_mib * MIB,
            staging_bytes=self.staging_mib * MIB,
            host_cache_bytes=self.host_cache_mib * MIB,
            num_threads=self.threads,
            profile_path=str(self.profile_path.resolve()),
        )


def load_settings(
    overrides: Mapping[str, object] | None = None, config: Path | None = None
) -> Settings:
    """Settings from `overrides` (the command line), then environment, then a TOML file.

    The file is `config`, which must exist, or rejoinder.toml in the data directory if there is one.
    Raises SettingsError.
    """
    given: dict[str, Any] = dict(overrides or {})
    path = config
    if path is None:
        default = Settings.model_fields["data_dir"].default
        data_dir = given.get("data_dir") or os.environ.get(f"{ENV_PREFIX}DATA_DIR") or default
        path = Path(str(data_dir)) / CONFIG_NAME
    in_file = _read_file(path, required=config is not None)

    class WithFile(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, in_file)

    try:
        return WithFile(**given)
    except ValidationError as error:
        lines = [_explain(fault, given, path) for fault in error.errors(include_url=False)]
        raise SettingsError("\n".join(lines)) from None


def unknown_variables() -> list[str]:
    """Environment variables with our prefix that are no setting: likely misspelled."""
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    return sorted(n for n in os.environ if n.upper().startswith(ENV_PREFIX) and n not in known)


def option_name(name: str) -> str:
    """The command line option of a setting."""
    return "--" + name.replace("_", "-")


def allowed(name: str) -> str:
    """The values that a setting may have, for people."""
    if name in _SHAPES:
        return _SHAPES[name]
    field = Settings.model_fields[name]
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(field.annotation))
    bounds: dict[type, Any] = {type(item): item for item in field.metadata}
    if Le in bounds:
        low = f"above {bounds[Gt].gt:g}" if Gt in bounds else _number(bounds[Ge].ge)
        return f"{low} to {_number(bounds[Le].le)}"
    if field.annotation is Path:
        return "a path"
    if field.annotation is not str:
        kind = "paths" if field.annotation == tuple[Path, ...] else "names"
        return kind + ", separated by commas" + (", at least one" if MinLen in bounds else "")
    return "text, not empty" if MinLen in bounds else "text"


def settings_table() -> str:
    """The settings as a Markdown table, as the README shows it."""
    rows = ["| Setting | Default | Allowed | Meaning |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        rows.append(
            f"| `{option_name(name)}` | {_default(field)} | {allowed(name)} | {field.description} |"
        )
    return "\n".join(rows)


def _default(field: FieldInfo) -> str:
    default = field.default
    if isinstance(default, tuple):
        default = ",".join(str(item) for item in default)
    return f"`{default}`" if str(default) else "none"


def _number(value: Any) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _read_file(path: Path, *, required: bool) -> dict[str, Any]:
    if not required and not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"the settings file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the settings file {path} is no valid TOML: {error}") from None


def _explain(fault: ErrorDetails, given: Mapping[str, object], path: Path) -> str:
    name = str(fault["loc"][0])
    if fault["type"] == "extra_forbidden":
        return f"there is no setting {name!r} (in {path})"
    value = fault["input"]
    if name in given:
        source, value = option_name(name), given[name]
    elif ENV_PREFIX + name.upper() in os.environ:
        source = ENV_PREFIX + name.upper()
        value = os.environ[source]
    else:
        source = f"{name} in {path}"
    if name == "weights" and fault["type"] == "value_error":
        return f"{source}: {str(value)!r} is not allowed: {fault['ctx']['error']}"
    return f"{source}: {str(value)!r} is not allowed; allowed: {allowed(name).replace('`', '')}"
