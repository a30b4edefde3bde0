"""Vector building blocks for Numba kernels, written as LLVM IR: what its own vectoriser misses.

All pointers are addresses (int64) and all strides are in bytes. A "vector" is 16 fp32 lanes; LLVM
lowers it to what the CPU has. Lanes are query rows throughout, so that softmax never crosses lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
import numba.core.config as numba_config
from llvmlite import ir
from numba.core import cgutils as numba_cgutils
from numba.core import types
from numba.extending import intrinsic

from kernels import compile_cache as compile_cache  # before any function is compiled

cgutils: Any = numba_cgutils  # untyped
_config: Any = numba_config  # its settings are made at run time

LANES = 16
VECTOR_BYTES = 4 * LANES

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
VF, VI = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


class _BFloat(ir.types.Type):  # type: ignore[misc]  # llvmlite has no bfloat of its own
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def _has_bf16_dot() -> bool:
    """Whether the CPU that numba compiles for (NUMBA_CPU_FEATURES, else this one) has it."""
    asked: str | None = _config.CPU_FEATURES
    if asked is not None:
        return "+avx512bf16" in asked.split(",")
    return bool(llvm.get_host_cpu_features().get("avx512bf16", False))


HAS_BF16_DOT = _has_bf16_dot()


def vector_intrinsic(function: Callable[..., Any]) -> Any:
    """numba's intrinsic, whose own type counts the typing context among the arguments."""
    return intrinsic(prefer_literal=True)(function)


def ir_pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(kind))


def ir_load(builder: Any, address: Any, kind: Any, align: int = 4) -> Any:
    value = builder.load(ir_pointer(builder, address, kind))
    value.align = align
    return value


def ir_store(builder: Any, value: Any, address: Any, align: int = 4) -> None:
    builder.store(value, ir_pointer(builder, address, value.type)).align = align


def ir_offset(builder: Any, address: Any, count: Any, stride: Any) -> Any:
    count = ir.Constant(I64, count) if isinstance(count, int) else count
    stride = ir.Constant(I64, stride) if isinstance(stride, int) else stride
    return builder.add(address, builder.mul(count, stride))


def ir_splat(builder: Any, value: Any) -> Any:
    kind = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), mask)


def ir_constant(value: float) -> Any:
    return ir.Constant(VF, [value] * LANES)


def ir_integers(value: int) -> Any:
    return ir.Constant(VI, [value] * LANES)


def ir_call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def ir_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return ir_call(builder, "llvm.fma.v16f32", VF, [a, b, c])


def ir_max(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


# 2**f on [-0.5, 0.5]: the Taylor series of exp(f ln 2); relative error below 2e-7
_EXP2 = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 0.24022651, 0.69314718, 1.0)


def ir_exp2(builder: Any, x: Any) -> Any:
    """2**x of a vector of fp32, x <= 127; exactly 0 below -126."""
    clamped = ir_max(builder, x, ir_constant(-126.0))
    whole = ir_call(builder, "llvm.nearbyint.v16f32", VF, [clamped])
    part = builder.fsub(clamped, whole)
    power = ir_constant(_EXP2[0])
    for coefficient in _EXP2[1:]:
        power = ir_fma(builder, power, part, ir_constant(coefficient))
    exponent = builder.shl(builder.fptosi(whole, VI), ir_integers(23))
    value = builder.bitcast(builder.add(builder.bitcast(power, VI), exponent), VF)
    tiny = builder.fcmp_ordered("<", x, ir_constant(-126.0))
    return builder.select(tiny, ir_constant(0.0), value)


def ir_dot(builder: Any, pairs: bool, total: Any, one: Any, two: Any) -> Any:
    """total + one * two, lane by lane, of 32-bit words: fp32, or pairs of bf16 summed in fp32."""
    if not pairs:
        return ir_fma(builder, builder.bitcast(one, VF), builder.bitcast(two, VF), total)
    if HAS_BF16_DOT:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        arguments = [total, builder.bitcast(one, PAIRS), builder.bitcast(two, PAIRS)]
        return ir_call(builder, name, VF, arguments)
    for half in (_low, _high):
        total = ir_fma(builder, half(builder, one), half(builder, two), total)
    return total


def _low(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.shl(words, ir_integers(16)), VF)


def _high(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.and_(words, ir_integers(-0x10000)), VF)


def ir_choose(
    builder: Any, value: Any, choices: Sequence[int], emit: Callable[[int], None]
) -> None:
    """Code for each choice, of which the one that equals the value runs."""
    for choice in choices:
        with builder.if_then(builder.icmp_signed("==", value, ir.Constant(I64, choice))):
            emit(choice)


def ir_prefetch(builder: Any, address: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(I8), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    flags = [ir.Constant(I32, flag) for flag in (0, 2, 1)]  # read, keep, data
    builder.call(function, [ir_pointer(builder, address, I8), *flags])


_BLOCK_ROWS = {1: 16, 2: 8, 3: 8, 4: 4, 5: 4, 6: 4}  # accumulators that fit the registers


@vector_intrinsic
def tile_product(
    context,
    pairs,
    scaled,
    vectors,
    a,
    a_row,
    a_step,
    b,
    b_step,
    c,
    c_row,
    factor,
    steps,
    ahead,
    ahead_row,
    ahead_lines,
):
    """C[i, :] = [C[i, :] * factor +] sum_k A[i, k] * B[k, :] of 16 rows and 1 to 6 vectors.

    pairs and scaled are literals. B: a row of vectors per step. pairs = 1: A and B are pairs of
    bf16 along k in 32 bits and the products are summed in fp32; pairs = 0: fp32.
    scaled = 1 starts from C times the vectors at `factor`, scaled = 0 from zero.
    Each step asks for one cache line ahead: `ahead_lines` of each row of `ahead_row` bytes.
    """
    is_pairs, is_scaled = bool(pairs.literal_value), bool(scaled.literal_value)

    def codegen(context, builder, signature, args):
        _, _, vectors, a, a_row, a_step, b, b_step, c, c_row, factor, steps = args[:12]
        ahead, ahead_row, ahead_lines = args[12:]
        one, line_bytes = ir.Constant(I64, 1), ir.Constant(I64, 64)
        jump = builder.sub(
            ahead_row, builder.shl(builder.sub(ahead_lines, one), ir.Constant(I64, 6))
        )

        def block(num_vectors: int, num_rows: int, a: Any, c: Any) -> None:
            columns = [ir.Constant(I64, j * VECTOR_BYTES) for j in range(num_vectors)]
            cells = [(i, j) for i in range(num_rows) for j in range(num_vectors)]
            outs = {
                (i, j): builder.add(ir_offset(builder, c, i, c_row), columns[j]) for i, j in cells
            }
            sums = {cell: cgutils.alloca_once(builder, VF) for cell in cells}
            for cell in cells:
                start = ir_constant(0.0)
                if is_scaled:
                    scale = ir_load(builder, builder.add(factor, columns[cell[1]]), VF)
                    start = builder.fmul(ir_load(builder, outs[cell], VF), scale)
                builder.store(start, sums[cell])
            a_rows = [ir_offset(builder, a, i, a_row) for i in range(num_rows)]
            wanted = cgutils.alloca_once_value(builder, ahead)
            left = cgutils.alloca_once_value(builder, ahead_lines)
            with cgutils.for_range(builder, steps) as loop:
                place = builder.load(wanted)
                ir_prefetch(builder, place)
                rest = builder.sub(builder.load(left), one)
                is_last = builder.icmp_signed("==", rest, ir.Constant(I64, 0))
                builder.store(builder.add(place, builder.select(is_last, jump, line_bytes)), wanted)
                builder.store(builder.select(is_last, ahead_lines, rest), left)
                shift = builder.mul(loop.index, a_step)
                line = builder.add(b, builder.mul(loop.index, b_step))
                words = [ir_load(builder, builder.add(line, column), VI) for column in columns]
                for i in range(num_rows):
                    word = ir_splat(builder, ir_load(builder, builder.add(a_rows[i], shift), I32))
                    for j in range(num_vectors):
                        total = builder.load(sums[i, j])
                        builder.store(ir_dot(builder, is_pairs, total, words[j], word), sums[i, j])
            for cell in cells:
                ir_store(builder, builder.load(sums[cell]), outs[cell])

        def blocks(num_vectors: int) -> None:
            num_rows = _BLOCK_ROWS[num_vectors]
            if num_rows == 16:
                block(num_vectors, 16, a, c)
                return
            with cgutils.for_range(builder, ir.Constant(I64, 16 // num_rows)) as loop:
                first = builder.mul(loop.index, ir.Constant(I64, num_rows))
                block(
                    num_vectors,
                    num_rows,
                    ir_offset(builder, a, first, a_row),
                    ir_offset(builder, c, first, c_row),
                )

        ir_choose(builder, vectors, list(_BLOCK_ROWS), blocks)
        return context.get_dummy_value()

    return types.void(pairs, scaled, *[types.int64] * 13), codegen


@vector_intrinsic
def softmax_column(
    context, pairs, masked, scores, score_step, keys, scale, limits, top, total, factor, weights
):
    """One vector of rows of a score tile -> weights; updates the running maximum and sum.

    pairs and masked are literals. scores: `keys` vectors at score_step; scale fp32 turns them into
    base-2 logarithms; masked = 1: a row sees the first limits[lane] (int32) keys of the tile.
    top, total: the running state, updated; factor: written, what earlier sums are multiplied by.
    weights: with pairs = 1 two keys' bf16 in each 32 bits, rounded to nearest, one vector per two
    keys, `keys` rounded up to even; else fp32 in place of the scores; total sums what is stored.
    """
    is_pairs, is_masked = bool(pairs.literal_value), bool(masked.literal_value)

    def codegen(context, builder, signature, args):
        _, _, scores, step, keys, scale, limits, top, total, factor, weights = args
        slope = ir_splat(builder, scale)
        limit = ir_load(builder, limits, VI) if is_masked else None
        lowest = ir_constant(float("-inf"))

        def score(index: Any) -> Any:
            value = ir_load(builder, builder.add(scores, builder.mul(index, step)), VF)
            if is_masked:
                key = ir_splat(builder, builder.trunc(index, I32))
                value = builder.select(builder.icmp_signed("<", key, limit), value, lowest)
            return value

        before = ir_load(builder, top, VF)
        peak = cgutils.alloca_once_value(builder, lowest)
        with cgutils.for_range(builder, keys) as loop:
            builder.store(ir_max(builder, score(loop.index), builder.load(peak)), peak)
        after = ir_max(builder, builder.fmul(builder.load(peak), slope), before)
        finite = builder.fcmp_ordered(">", after, lowest)
        anchor = builder.select(finite, after, ir_constant(0.0))
        shrink = ir_exp2(builder, builder.fsub(before, anchor))
        negated = builder.fneg(anchor)
        added = cgutils.alloca_once_value(builder, ir_constant(0.0))

        def weight(index: Any) -> Any:
            return ir_exp2(builder, ir_fma(builder, score(index), slope, negated))

        def add(value: Any) -> None:
            builder.store(builder.fadd(builder.load(added), value), added)

        def rounded(value: Any) -> Any:
            bits = builder.add(builder.bitcast(value, VI), ir_integers(0x8000))
            return builder.and_(bits, ir_integers(-0x10000))

        if is_pairs:
            one = ir.Constant(I64, 1)
            with cgutils.for_range(builder, builder.lshr(keys, one)) as loop:
                first = builder.shl(loop.index, one)
                low = rounded(weight(first))
                high = rounded(weight(builder.add(first, one)))
                add(builder.fadd(builder.bitcast(low, VF), builder.bitcast(high, VF)))
                both = builder.or_(builder.lshr(low, ir_integers(16)), high)
                ir_store(builder, both, builder.add(weights, builder.mul(loop.index, step)))
            with builder.if_then(builder.trunc(keys, ir.IntType(1))):
                low = rounded(weight(builder.sub(keys, one)))
                add(builder.bitcast(low, VF))
                place = builder.mul(builder.lshr(keys, one), step)
                ir_store(builder, builder.lshr(low, ir_integers(16)), builder.add(weights, place))
        else:
            with cgutils.for_range(builder, keys) as loop:
                value = weight(loop.index)
                add(value)
                ir_store(builder, value, builder.add(weights, builder.mul(loop.index, step)))
        ir_store(builder, after, top)
        ir_store(builder, shrink, factor)
        updated = ir_fma(builder, ir_load(builder, total, VF), shrink, builder.load(added))
        ir_store(builder, updated, total)
        return context.get_dummy_value()

    kinds = [types.int64] * 3 + [types.float32] + [types.int64] * 5
    return types.void(pairs, masked, *kinds), codegen


@vector_intrinsic
def interleave(context, first, second, out, vectors):
    """out[i] = first[i] | second[i] << 16 for 16 * vectors values of 16 bits."""

    def codegen(context, builder, signature, args):
        first, second, out, vectors = args
        half = ir.VectorType(I16, LANES)
        with cgutils.for_range(builder, vectors) as loop:
            place = builder.mul(loop.index, ir.Constant(I64, 2 * LANES))
            low = builder.zext(ir_load(builder, builder.add(first, place), half, 2), VI)
            high = builder.zext(ir_load(builder, builder.add(second, place), half, 2), VI)
            both = builder.or_(low, builder.shl(high, ir_integers(16)))
            ir_store(builder, both, ir_offset(builder, out, loop.index, VECTOR_BYTES))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@vector_intrinsic
def prefetch(context, address, size):
    """Ask for the `size` bytes (a multiple of 64 or less) at `address`."""

    def codegen(context, builder, signature, args):
        lines = builder.lshr(builder.add(args[1], ir.Constant(I64, 63)), ir.Constant(I64, 6))
        with cgutils.for_range(builder, lines) as loop:
            ir_prefetch(builder, ir_offset(builder, args[0], loop.index, 64))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@vector_intrinsic
def fill(context, address, value, count):
    """`count` (a multiple of 16) fp32 numbers become `value`."""

    def codegen(context, builder, signature, args):
        vectors = builder.lshr(args[2], ir.Constant(I64, 4))
        value = ir_splat(builder, args[1])
        with cgutils.for_range(builder, vectors) as loop:
            ir_store(builder, value, ir_offset(builder, args[0], loop.index, VECTOR_BYTES))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), codegen


@vector_intrinsic
def scaled_add(context, one, one_factor, two, two_factor, vectors):
    """one = one * one_factor + two * two_factor, lane by lane."""

    def codegen(context, builder, signature, args):
        with cgutils.for_range(builder, args[4]) as loop:
            places = [ir_offset(builder, arg, loop.index, VECTOR_BYTES) for arg in args[:4]]
            one, one_factor, two, two_factor = (ir_load(builder, place, VF) for place in places)
            total = ir_fma(builder, two, two_factor, builder.fmul(one, one_factor))
            ir_store(builder, total, places[0])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@vector_intrinsic
def int64_pointer(context, address):
    """The address as a pointer, for carray."""

    def codegen(context, builder, signature, args):
        return ir_pointer(builder, args[0], I64)

    return types.CPointer(types.int64)(types.int64), codegen


def _memory(kind: Any, numba_type: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    @vector_intrinsic
    def load(context, address):
        def codegen(context, builder, signature, args):
            return ir_load(builder, args[0], kind, 2)

        return numba_type(types.int64), codegen

    @vector_intrinsic
    def store(context, address, value):
        def codegen(context, builder, signature, args):
            ir_store(builder, args[1], args[0], 2)
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    return load, store


load_u16, store_u16 = _memory(I16, types.uint16)
load_i32, store_i32 = _memory(I32, types.int32)
load_i64, store_i64 = _memory(I64, types.int64)
load_f32, store_f32 = _memory(F32, types.float32)
load_f64, store_f64 = _memory(ir.DoubleType(), types.float64)
