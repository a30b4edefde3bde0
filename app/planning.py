"""What `rejoinder profile` and `rejoinder plan` print. The measuring is another process's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from app.settings import Settings
from engine.config import CheckpointBits, EngineConfig
from engine.errors import EngineError
from engine.model.geometry import ModelConfig
from engine.model.model_config import read_model_config
from engine.model.source import resolve_model
from engine.profile import machine
from engine.profile.cache import ProfileCache
from engine.profile.record import AttentionCosts, ComputeCosts, DiskRead
from engine.profile.shapes import SHAPES, Shape, scaled_costs
from engine.profile.weight_figures import WeightFigures
from engine.restoration.coding import ITEM_BYTES, Coding
from engine.restoration.plan import CheckpointPlan, fastest, make_plan, smallest
from engine.restoration.planner import Planner

Say = Callable[[str], None]
TOKEN_COUNTS = (64, 256, 512, 1024, 2048)
MIB = 1 << 20


class NotMeasured(EngineError):
    """The machine could not be measured; the message is for the operator."""


@dataclass(frozen=True)
class Measured:
    """The kept figures of one model on this machine."""

    config: EngineConfig
    geometry: ModelConfig
    disk: DiskRead | None
    compute: ComputeCosts
    attention: AttentionCosts


def measured(settings: Settings, say: Say, *, again: bool = False) -> Measured:
    """The figures of the settings' model; what is missing is measured now, with progress.

    Raises NotMeasured, and ModelError when there is no such model.
    """
    model_dir = resolve_model(settings.model, settings.data_dir, say)
    config = settings.engine_config(model_dir)
    geometry = read_model_config(model_dir)
    found = None if again else _kept(config, geometry)
    if found is None:
        _measure(config, say, again=again)
        found = _kept(config, geometry)
    if found is None:
        raise NotMeasured(f"the figures could not be kept in {config.profile_path}")
    return found


def kept(settings: Settings) -> Measured | None:
    """The figures of the settings' model, None when some were not measured; measures nothing.

    Raises ModelError when there is no such model.
    """
    model_dir = resolve_model(settings.model, settings.data_dir, lambda line: None)
    return _kept(settings.engine_config(model_dir), read_model_config(model_dir))


def _kept(config: EngineConfig, geometry: ModelConfig) -> Measured | None:
    cache = ProfileCache(Path(config.profile_path))
    format = machine.format_without_figures(config)
    if format is None:
        key = machine.formats_key(config, machine.rotates(config, geometry))
        formats = cache.get(key, WeightFigures)
        if formats is None:
            return None
        format = formats.best().format
    config = msgspec.structs.replace(config, weights=format)
    disk = None
    if config.checkpoint_dirs:  # the slowest, as the engine takes it
        disks = [cache.get(machine.disk_key(Path(one)), DiskRead) for one in config.checkpoint_dirs]
        disk = min((one for one in disks if one), key=lambda one: one.bytes_per_s, default=None)
    compute = cache.get(machine.compute_key(config, geometry), ComputeCosts)
    attention = cache.get(machine.attention_key(config, geometry), AttentionCosts)
    if compute is None or attention is None or (config.checkpoint_dirs and disk is None):
        return None
    return Measured(config, geometry, disk, compute, attention)


def _measure(config: EngineConfig, say: Say, *, again: bool) -> None:
    command = [sys.executable, "-m", "app.profile_process", *(["--again"] if again else [])]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(config))
        process.stdin.close()
        for line in process.stdout:
            say(line.decode(errors="replace").rstrip())
    if process.returncode:
        raise NotMeasured("the machine could not be measured; the lines above say why")


def profile_lines(found: Measured) -> list[str]:
    """The figures as text, for people."""
    geometry, compute = found.geometry, found.compute
    lines = [
        f"{found.config.model_name}: {_shape_line(Shape.of(geometry))}, "
        f"{machine.dtype_name(found.config.dtype)}, weights in {found.config.weights}",
        f"machine: {machine.cpu()}; {len(found.attention.rows)} x {len(found.attention.tokens)} "
        f"places of shared reads; kept in {found.config.profile_path}",
        "",
    ]
    disk = found.disk
    if disk is None:
        lines.append("disk        nothing is saved, so it was not measured")
    else:
        lines.append(
            f"disk        {disk.bytes_per_s / 1e6:.0f} MB/s cold through the chunk store, "
            f"first bytes after {disk.latency_s * 1e3:.1f} ms"
        )
    lines += [
        f"GEMM        {compute.gemm_flops_per_s / 1e9:.0f} GFLOP/s",
        f"attention   {compute.pair_flops_per_s / 1e9:.0f} GFLOP/s over earlier tokens",
        f"page copies {compute.copy_bytes_per_s / 1e9:.1f} GB/s",
    ]
    if compute.code_s:
        rates = ", ".join(f"{name} {1e-9 / each:.1f}" for name, each in compute.code_s.items())
        lines.append(f"coded       {rates} billion numbers a second")
    if compute.host_to_device_bytes_per_s is not None:
        lines.append(f"to device   {compute.host_to_device_bytes_per_s / 1e9:.1f} GB/s")
    quiet = min(compute.undisturbed, found.attention.undisturbed)
    if quiet < 0.9:
        lines.append(f"            beside other programs, which took {100 * (1 - quiet):.0f} %")
    lines += ["", "one layer of a chat, milliseconds by tokens"]
    rows = [["", *(str(n) for n in TOKEN_COUNTS)]]
    for name, cost in (
        ("run again", lambda n: compute.layer(n, 0)),
        ("run again, behind 2048", lambda n: compute.layer(n, 2048)),
        ("from hidden states", compute.hidden),
        ("from stored K/V", compute.kv),
    ):
        rows.append([name, *(f"{cost(n) * 1e3:.2f}" for n in TOKEN_COUNTS)])
    lines += _table(rows)
    lines += ["", "one read of a prefix for all chats, time over one read for each"]
    attention = found.attention
    rows = [["chats", *(f"{n} tokens" for n in attention.tokens)]]
    for count, shared, own in zip(attention.rows, attention.shared_s, attention.own_s, strict=True):
        ratios = (s / o for s, o in zip(shared, own, strict=True))
        rows.append([str(count), *(f"{ratio:.2f}" for ratio in ratios)])
    return lines + _table(rows)


@dataclass(frozen=True)
class Question:
    """What `rejoinder plan` is asked."""

    tokens: int
    prefix: int
    disk_mbps: float | None  # 10^6 bytes a second; None: as measured
    geometry: str | None  # a name of SHAPES; None: the model's own
    target_ms: float | None  # the smallest checkpoint within it; None: the fastest restore
    bits: CheckpointBits = 16  # of a number on disk; 16: as the model computes


def plan_lines(found: Measured, question: Question) -> list[str]:
    """The chosen plan beside the pure ones, and why. Raises NotMeasured without a disk speed."""
    coding = Coding(question.bits, machine.dtype_name(found.config.dtype))
    disk = _disk(found, question)
    if question.geometry is None:
        shape, compute = Shape.of(found.geometry), found.compute
        name, source = found.config.model_name, "as measured on this machine"
    else:
        shape = SHAPES[question.geometry]
        compute = scaled_costs(found.compute, shape, ITEM_BYTES[coding.dtype])
        name = question.geometry
        source = (
            f"scaled from this machine's {compute.gemm_flops_per_s / 1e9:.0f} GFLOP/s, not measured"
        )
    costs = Planner(shape, coding, compute, disk).costs(question.prefix, question.tokens)
    if question.target_ms is None:
        chosen = fastest(costs)
    else:
        chosen = smallest(costs, question.target_ms / 1e3)
    layers = shape.num_layers
    plans = {
        "chosen": chosen,
        "hidden": make_plan(costs, 0, layers, ""),
        "kv": make_plan(costs, 0, 0, ""),
        "recompute": make_plan(costs, layers, 0, ""),
    }
    speed = "given" if question.disk_mbps is not None else "as measured"
    stored = "" if question.bits == 16 else f", stored in {question.bits} bits"
    behind = f" behind {question.prefix} shared ones" if question.prefix else ""
    lines = [
        f"{name}: {_shape_line(shape)}, {machine.dtype_name(found.config.dtype)}",
        f"{question.tokens} tokens of a chat{behind}{stored}; "
        f"disk {disk.bytes_per_s / 1e6:.0f} MB/s, {speed}; compute {source}",
        "",
    ]
    head = ["", "layers", "predicted", "reads", "compute", "bytes/token", "total"]
    rows = [_plan_row(label, plan, shape, coding, question.tokens) for label, plan in plans.items()]
    table = _table([head, *rows], left=2)
    return [*lines, *table, "", f"chosen: {chosen.reason}."]


def _disk(found: Measured, question: Question) -> DiskRead:
    if question.disk_mbps is not None:
        speed = question.disk_mbps * 1e6
        first = found.disk.first_bytes if found.disk else 0
        latency = found.disk.latency_s if found.disk else 0.0
        return DiskRead(bytes_per_s=speed, first_s=latency + first / speed, first_bytes=first)
    if found.disk is None:
        raise NotMeasured("nothing is saved, so the disk was not measured: give --disk-mbps")
    return found.disk


def _plan_row(
    label: str, plan: CheckpointPlan, shape: Shape, coding: Coding, tokens: int
) -> list[str]:
    predicted = plan.predicted
    assert predicted is not None, "a plan was made without its times"
    each = plan.bytes_per_token(
        coding.hidden_bytes(shape.hidden_size), coding.kv_bytes(shape.num_kv_heads, shape.head_dim)
    )
    return [
        label,
        plan.name,
        f"{predicted.total_ms:.1f} ms",
        f"{predicted.io_ms:.1f} ms",
        f"{predicted.compute_ms:.1f} ms",
        str(each),
        f"{each * tokens / MIB:.1f} MiB",
    ]


def _shape_line(shape: Shape) -> str:
    ratio = shape.hidden_size / (2 * shape.kv_size)
    return (
        f"{shape.num_layers} layers, width {shape.hidden_size}, K/V width {shape.kv_size} "
        f"(hidden states are {ratio:.2f}x K/V)"
    )


def _table(rows: list[list[str]], left: int = 1) -> list[str]:
    """Columns side by side; the first `left` begin, the others end at the same place."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
