"""The search for the best plan, against brute force, the paper's formulas and common sense."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import kernels.coding
from engine.config import CheckpointBits
from engine.profile.record import ComputeCosts, DiskRead
from engine.profile.shapes import SHAPES, Shape, scaled_costs
from engine.restoration.coding import CODED_BITS, Coding
from engine.restoration.plan import (
    CheckpointPlan,
    LayerCosts,
    RestoredPart,
    choose_plan,
    fastest,
    make_plan,
    plan_name,
    smallest,
)
from engine.restoration.planner import Planner

seconds = st.floats(1e-6, 1e-1)
EVERY_BITS: tuple[CheckpointBits, ...] = (16, 8, 6)


@st.composite
def any_costs(draw: st.DrawFn, max_layers: int = 12) -> LayerCosts:
    """Random tables, sensible or not."""
    return LayerCosts(
        num_layers=draw(st.integers(1, max_layers)),
        recompute_s=draw(seconds),
        hidden_s=draw(seconds),
        kv_s=draw(seconds),
        hidden_bytes=draw(st.integers(1, 1 << 20)),
        kv_bytes=draw(st.integers(1, 1 << 20)),
        bytes_per_s=draw(st.floats(1e6, 1e10)),
        latency_s=draw(st.floats(0, 1e-2)),
        stripes=draw(st.integers(1, 200)),
        request_bytes=draw(st.integers(0, 1 << 22)),
        answer_s=draw(st.floats(0, 1e-1)),
    )


def makespan(costs: LayerCosts, methods: tuple[str, ...]) -> tuple[float, int]:
    """Milliseconds and bytes of a plan, added up layer by layer."""
    compute, read, stored = 0.0, 0.0, 0
    for layer, method in enumerate(methods):
        if method == "recompute":
            compute += costs.recompute_s
        elif method == "kv":
            compute += costs.kv_s
            stored += costs.kv_bytes
        else:
            compute += costs.hidden_s
            before = methods[layer - 1] if layer else "recompute"
            stored += 0 if before == "recompute" else costs.hidden_bytes
    read = stored / costs.bytes_per_s
    if not stored:
        return 1e3 * compute, 0
    one_read = min(stored, max(costs.request_bytes, stored / costs.stripes))  # bytes
    first_read, last_compute = read * one_read / stored, compute * one_read / stored
    # compute waits for the first read, or is left with what the last one brought
    alone = first_read if compute > read else last_compute
    return 1e3 * (max(compute, read) + alone + costs.latency_s), stored


def all_plans(costs: LayerCosts) -> list[tuple[str, ...]]:
    """Every assignment of methods to layers that is in order."""
    every = itertools.combinations_with_replacement(("recompute", "hidden", "kv"), costs.num_layers)
    if costs.hidden_bytes < costs.kv_bytes:
        return list(every)
    return [m for m in every if m.count("hidden") <= 1]


@given(any_costs())
def test_the_fastest_plan_is_that_of_brute_force(costs: LayerCosts) -> None:
    plan = fastest(costs)
    options = {methods: makespan(costs, methods) for methods in all_plans(costs)}
    best = min(ms for ms, _ in options.values())
    ms, stored = options[plan.methods]
    assert plan.predicted is not None
    assert plan.predicted.total_ms == pytest.approx(ms)
    assert ms <= best * 1.05 * (1 + 1e-9)
    # of the plans within 5 % none is smaller
    assert stored == min(size for each, size in options.values() if each <= best * 1.05)


@given(any_costs(), st.floats(1e-4, 2.0))
def test_the_smallest_within_a_target_is_that_of_brute_force(
    costs: LayerCosts, target_s: float
) -> None:
    plan = smallest(costs, target_s)
    options = {methods: makespan(costs, methods) for methods in all_plans(costs)}
    limit = (target_s - costs.answer_s) * 1e3
    within = [(size, ms) for ms, size in options.values() if ms <= limit]
    assume(all(abs(ms - limit) > 1e-9 * limit for ms, _ in options.values()))
    ms, stored = options[plan.methods]
    if within:
        assert stored == min(within)[0]
        assert ms <= limit
    else:
        assert ms == pytest.approx(min(ms for ms, _ in options.values()))
        assert "no plan" in plan.reason


def mha(**changes: float) -> LayerCosts:
    """Multi-head attention: hidden states are half of K/V; nothing but the two sums counts."""
    base = LayerCosts(32, 16e-3, 2e-3, 0.0, 1 << 20, 2 << 20, 1e9, stripes=1 << 30)
    return replace(base, **changes)  # type: ignore[arg-type]  # all fields named are numbers


def test_compute_bound_reduces_to_hidden_and_kv_of_the_paper() -> None:
    """HCache, section 4.2: L_H = N io_kv / (c_hidden + io_kv - io_hidden), to the layer."""
    costs = mha(hidden_s=4e-3)
    io_hidden, io_kv = costs.hidden_bytes / 1e9, costs.kv_bytes / 1e9
    expected = 32 * io_kv / (4e-3 + io_kv - io_hidden)
    best = min((costs.predict(r, h).total_ms, r, h) for r, h in costs.plans())
    assert best[1] == 0
    assert abs(best[2] - expected) <= 1
    plan = fastest(costs)
    assert set(plan.methods) == {"hidden", "kv"}


def test_io_bound_reduces_to_recompute_and_hidden_of_the_paper() -> None:
    """HCache, section 4.2: L_H = N c_layer / (io_hidden - c_hidden + c_layer), to the layer."""
    costs = mha(bytes_per_s=1e8)
    io_hidden = costs.hidden_bytes / 1e8
    expected = 32 * 16e-3 / (io_hidden - 2e-3 + 16e-3)
    best = min((costs.predict(r, h).total_ms, r, h) for r, h in costs.plans())
    assert best[1] + best[2] == 32
    assert abs(best[2] - expected) <= 1
    assert set(fastest(costs).methods) == {"recompute", "hidden"}


@given(any_costs())
def test_hidden_states_no_smaller_than_kv_are_never_stored(costs: LayerCosts) -> None:
    wide = replace(costs, hidden_bytes=max(costs.hidden_bytes, costs.kv_bytes))
    assert fastest(wide).hidden_layers == ()
    assert smallest(wide, 0.05).hidden_layers == ()


@given(any_costs(), st.floats(1.0, 10.0))
def test_a_faster_disk_never_makes_a_restore_slower(costs: LayerCosts, factor: float) -> None:
    quick = replace(costs, bytes_per_s=costs.bytes_per_s * factor)
    slow_best = min(costs.predict(r, h).total_ms for r, h in costs.plans())
    assert min(quick.predict(r, h).total_ms for r, h in quick.plans()) <= slow_best * (1 + 1e-9)


def test_extremes() -> None:
    assert fastest(mha(bytes_per_s=1e5)).name in ("recompute", "31 recompute + 1 hidden")
    assert fastest(mha(bytes_per_s=1e13, hidden_s=1.0, recompute_s=9.0)).methods.count("kv") == 32
    free_compute = fastest(mha(hidden_s=1e-9, recompute_s=1.0, kv_s=1e-9))
    assert free_compute.name == "hidden"
    assert free_compute.at_hand == 0
    assert len(free_compute.hidden_layers) == 31


MACHINE = ComputeCosts(
    rows=(64, 256, 512),
    layer_s=(1.6e-3, 6e-3, 12e-3),
    hidden_s=(1.2e-4, 3.3e-4, 6e-4),
    kv_s=(4e-6, 1.6e-5, 3.2e-5),
    pair_s=2.5e-8,
    gemm_flops_per_s=400e9,
    pair_flops_per_s=100e9,
    copy_bytes_per_s=12e9,
    code_s={"hidden8": 0.3e-9, "hidden6": 0.6e-9, "kv8": 0.5e-9},
)
BF16 = Coding(16, "bf16")


def planner(name: str, mbps: float, coding: Coding = BF16) -> Planner:
    geometry = SHAPES[name]
    costs = scaled_costs(MACHINE, geometry, 2)
    disk = DiskRead(bytes_per_s=mbps * 1e6, first_s=0, first_bytes=0)
    return Planner(geometry, coding, costs, disk)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("mbps", [125, 500, 2000, 8000])
def test_geometries(name: str, mbps: float) -> None:
    """Which methods meet in a plan follows from the shape, the rest from the disk."""
    geometry = SHAPES[name]
    plan = planner(name, mbps).plan(512, 2048)
    assert len(plan.methods) == geometry.num_layers
    if geometry.hidden_size > 2 * geometry.kv_size:
        assert plan.hidden_layers == ()
    item = plan.bytes_per_token(2 * geometry.hidden_size, 4 * geometry.kv_size)
    assert item <= geometry.num_layers * 2 * geometry.kv_size * 2
    if geometry.kv_size == geometry.hidden_size and mbps == 500:
        assert plan.name != "kv"  # half the bytes are worth some projections


@pytest.mark.parametrize("bits", [8, 6])
@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-1.7b", "llama-2-7b", "llama-3-8b"])
@pytest.mark.parametrize("mbps", [125, 2000])
def test_codings_are_weighed_with_their_bytes_and_what_they_cost(
    name: str, bits: CheckpointBits, mbps: float
) -> None:
    """Against brute force over all plans, with both the disk and the decoding of the codes."""
    shape = SHAPES[name]
    plans = planner(name, mbps, Coding(bits, "bf16"))
    costs = plans.costs(0, 2048)
    assert costs.hidden_bytes == 2048 * (shape.hidden_size * bits // 8 + 2)
    assert costs.kv_bytes == 2048 * 2 * shape.num_kv_heads * (shape.head_dim + 2)
    each = plans.compute.code_s[f"hidden{bits}"]
    decoding = 2048 * shape.hidden_size * each
    assert costs.hidden_s == pytest.approx(plans.compute.hidden(2048) + decoding)
    assert costs.kv_s == pytest.approx(2048 * 2 * shape.kv_size * 0.5e-9)
    plan = plans.plan(0, 2048)
    if costs.hidden_bytes >= costs.kv_bytes:
        assert plan.hidden_layers == ()
    assert plan.predicted is not None
    best = min(
        makespan(costs, methods)[0]
        for recompute in range(shape.num_layers + 1)
        for hidden in range(shape.num_layers + 1 - recompute)
        for methods in [
            ("recompute",) * recompute
            + ("hidden",) * hidden
            + ("kv",) * (shape.num_layers - recompute - hidden)
        ]
        if costs.hidden_bytes < costs.kv_bytes or hidden <= 1
    )
    assert best <= plan.predicted.total_ms * (1 + 1e-9) <= best * 1.05 * (1 + 1e-6)


def test_hidden_states_of_multi_head_attention_against_kv_in_bf16() -> None:
    """How many times smaller a chat's checkpoint is, all layers stored in one way."""
    for name in ("llama-2-7b", "smollm2-1.7b", "olmo-2-13b"):
        shape = SHAPES[name]
        kv = choose_plan("kv", shape.num_layers, 1, 1).bytes_per_token(
            0, BF16.kv_bytes(shape.num_kv_heads, shape.head_dim)
        )
        hidden = choose_plan("hidden", shape.num_layers, 1, 1)
        smaller = {
            bits: kv
            / hidden.bytes_per_token(Coding(bits, "bf16").hidden_bytes(shape.hidden_size), 0)
            for bits in EVERY_BITS
        }
        assert smaller[16] >= 1.9
        assert smaller[8] >= 3.7
        assert smaller[6] >= 5.0


def test_what_must_be_rotated() -> None:
    """Only what may store coded hidden states; those of few KV heads never win by themselves."""
    mha, gqa = (2048, 32, 64), (576, 3, 64)
    coded, plain = Coding(8, "bf16"), Coding(16, "bf16")
    assert coded.needs_rotation("auto", *mha)
    assert coded.needs_rotation("hidden", *gqa)
    assert not coded.needs_rotation("auto", *gqa)
    assert not coded.needs_rotation("kv", *mha)
    assert not plain.needs_rotation("hidden", *mha)


def test_each_coding_has_a_fingerprint_of_its_own() -> None:
    weights = bytes(range(16))
    prints = [Coding(bits, "bf16").fingerprint(weights) for bits in EVERY_BITS]
    assert prints[0] == weights
    assert len(set(prints)) == 3


@pytest.mark.parametrize("bits", [8, 6])
def test_sizes_are_those_of_the_kernels(bits: CheckpointBits) -> None:
    coding = Coding(bits, "bf16")
    assert coding.hidden_bytes(576) == kernels.coding.hidden_row_bytes(576, bits)
    assert coding.kv_bytes(3, 64) == kernels.coding.kv_row_bytes(3, 64)
    assert CODED_BITS[coding.hidden] == bits
    assert CODED_BITS[coding.kv] == 8


def test_a_slower_disk_stores_less() -> None:
    for name in ("smollm2-135m", "llama-3-8b", "smollm2-1.7b"):
        geometry = SHAPES[name]
        sizes = [
            planner(name, mbps)
            .plan(0, 2048)
            .bytes_per_token(2 * geometry.hidden_size, 4 * geometry.kv_size)
            for mbps in (50, 125, 500, 4000)
        ]
        assert sizes == sorted(sizes)


def test_a_plan_is_for_the_length_that_a_chat_is_expected_to_reach() -> None:
    plans = planner("smollm2-135m", 125)
    assert plans.plan(100, 1500) is plans.plan(128, 2048)
    assert plans.plan(0, 1) is plans.plan(0, 1024)
    assert "2048 tokens behind 128" in plans.plan(100, 1500).reason
    short, long = plans.plan(0, 1024), plans.plan(4096, 8192)
    # attention over what is before makes recomputing dearer
    assert long.methods.count("recompute") < short.methods.count("recompute")


def test_every_plan_within_the_context_is_staged() -> None:
    plans = planner("smollm2-1.7b", 2000)
    staged = set(plans.hidden_layers(8192))
    for prefix in (0, 1, 63, 700, 4096):
        for tokens in (1, 64, 1025, 5000, 8192):
            assert staged.issuperset(plans.plan(prefix, tokens).hidden_layers)


def test_a_restore_of_one_plan_is_predicted_as_it_was_planned() -> None:
    plans = planner("smollm2-1.7b", 500)
    plan = plans.plan(0, 2048)
    counts = {name: plan.methods.count(name) for name in ("recompute", "hidden", "kv")}
    stored = plan.bytes_per_token(2 * 2048, 4 * 2048) * 2048
    part = RestoredPart(0, 2048, counts["recompute"], counts["hidden"], counts["kv"], stored)
    assert plan.predicted is not None
    assert plans.predict([part]).total_ms == pytest.approx(plan.predicted.total_ms)


def test_costs_add_up_over_slices() -> None:
    assert MACHINE.hidden(1024) == pytest.approx(2 * 6e-4)
    assert MACHINE.hidden(512 + 64) == pytest.approx(6e-4 + 1.2e-4)
    assert MACHINE.hidden(384) == pytest.approx((3.3e-4 + 6e-4) / 2)
    own = 12e-3 + 12e-3 + 2.5e-8 * 512 * 512  # the second slice reads the first
    assert MACHINE.layer(1024, 0) == pytest.approx(own)
    assert MACHINE.layer(1024, 100) == pytest.approx(own + 2.5e-8 * 1024 * 100)


@pytest.mark.parametrize(
    ("hidden_size", "kv_size", "expected"),
    [
        (576, 192, "kv"),  # SmolLM2-135M: hidden states take 1.5x the bytes
        (2048, 2048, "hidden"),  # multi-head attention: half the bytes
        (4096, 1024, "kv"),  # Llama-3-8B: 2x
        (1024, 512, "kv"),  # the same bytes, and no projection
    ],
)
def test_without_a_measured_disk_auto_takes_what_is_smaller(
    hidden_size: int, kv_size: int, expected: str
) -> None:
    plan = choose_plan("auto", 4, 2 * hidden_size, 4 * kv_size)
    assert plan.methods == (expected,) * 4
    assert plan.name == expected
    assert f"{hidden_size / (2 * kv_size):.2f}x" in plan.reason


def test_a_method_that_is_asked_for_is_taken() -> None:
    for method in ("hidden", "kv", "recompute"):
        plan = choose_plan(method, 3, 1152, 768)
        assert plan.methods == (method,) * 3
        assert method in plan.reason


def test_bytes_of_a_token() -> None:
    assert choose_plan("kv", 30, 1152, 768).bytes_per_token(1152, 768) == 30 * 2 * 192 * 2
    # the input of layer 0 is the embedding, which is at hand
    assert choose_plan("hidden", 30, 1152, 768).bytes_per_token(1152, 768) == 29 * 576 * 2
    assert choose_plan("recompute", 30, 1152, 768).bytes_per_token(1152, 768) == 0
    mixed = make_plan(replace(mha(), num_layers=10), 3, 4, "")
    assert mixed.name == "3 recompute + 4 hidden + 3 kv"
    assert (mixed.at_hand, mixed.hidden_layers, mixed.kv_layers) == (3, (4, 5, 6), (7, 8, 9))
    assert mixed.bytes_per_token(1152, 768) == (3 * 576 + 3 * 2 * 192) * 2


def test_layers_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="order"):
        CheckpointPlan("", ("kv", "hidden"), "")
    assert plan_name(("recompute", "kv")) == "1 recompute + 1 kv"


def test_flops_of_the_paper() -> None:
    """24 D^2 a token and layer with an MLP of 8/3 D in three parts, 4 D^2 to project K and V."""
    shape = Shape(1, 3072, 24, 24, 128, 8192)
    assert shape.layer_flops == pytest.approx(24 * 3072**2)
    costs = scaled_costs(MACHINE, shape, 2)
    assert costs.hidden(512) == pytest.approx(512 * 4 * 3072**2 / 400e9)
