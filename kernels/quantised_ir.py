"""Quantised products for Numba kernels, as LLVM IR: 16 outputs to a vector, groups of 32 inputs.

Pointers are addresses (int64). `kernels.quantised` has the formats.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numba.core.config as numba_config
from llvmlite import ir
from numba.core import types

from kernels.row_ir import ir_read, ir_write
from kernels.vector_ir import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    VF,
    VI,
    cgutils,
    ir_call,
    ir_constant,
    ir_fma,
    ir_integers,
    ir_load,
    ir_offset,
    ir_prefetch,
    ir_splat,
    ir_store,
    vector_intrinsic,
)

GROUP = 32  # inputs that share a scale
AHEAD_BYTES = 2048  # how far in front of the product weights are asked for

_config: Any = numba_config  # its settings are made at run time
_I8 = ir.IntType(8)
_BYTES = ir.VectorType(_I8, 4 * LANES)
_HALF = ir.VectorType(ir.HalfType(), LANES)
_WORDS = ir.VectorType(I16, LANES)
_CODES = ir.VectorType(_I8, LANES)


def _has_byte_dot() -> bool:
    """Whether the CPU that numba compiles for (NUMBA_CPU_FEATURES, else this one) has it."""
    asked: str | None = _config.CPU_FEATURES
    if asked is not None:
        return "+avx512vnni" in asked.split(",")
    return bool(llvm.get_host_cpu_features().get("avx512vnni", False))


HAS_BYTE_DOT = _has_byte_dot()


def ir_byte_dot(builder: Any, total: Any, one: Any, two: Any) -> Any:
    """total + one . two in every 32-bit lane, of four unsigned and four signed bytes; exact."""
    if HAS_BYTE_DOT:
        arguments = [total, builder.bitcast(one, _BYTES), builder.bitcast(two, _BYTES)]
        return ir_call(builder, "llvm.x86.avx512.vpdpbusd.512", VI, arguments)
    for place in range(0, 32, 8):
        left = builder.and_(builder.lshr(one, ir_integers(place)), ir_integers(255))
        right = builder.ashr(builder.shl(two, ir_integers(24 - place)), ir_integers(24))
        total = builder.add(total, builder.mul(left, right))
    return total


@vector_intrinsic
def quantised_tile(
    context, bits, planes, bf16, rows, codes, scales, x, x_row, groups, bias, out, out_row
):
    """out[r, 0:16] = sum_g scale_g * (codes_g . x_g) + offset_g * sum(x_g), plus the bias.

    bits (4 or 8), planes (1 or 2), bf16 (of `out`) and rows (up to 8, of x) are literals. codes:
    `groups` pieces of 256 or 512 bytes; scales: as many of 16 fp16, followed with 4 bits by as many
    offsets; x: rows of `quantise_row`; bias 16 fp32. With two planes a row of `out` is the sum of
    two of x. A row's sums are made in the same order whatever `rows` is.
    """
    is_four, count, is_bf16 = bits.literal_value == 4, rows.literal_value, bool(bf16.literal_value)
    summed = planes.literal_value
    vectors = 4 if is_four else 8
    chains = {1: 4, 2: 2}.get(count, 1)  # sums in flight, to hide a product's latency

    def codegen(context, builder, signature, args):
        codes, scales, x, x_row, groups, bias, out, out_row = args[4:]
        places = [ir_offset(builder, x, r, x_row) for r in range(count)]
        width = ir_offset(builder, ir.Constant(I64, 0), groups, GROUP)
        offsets = ir_offset(builder, scales, groups, 2 * LANES)
        sums = [cgutils.alloca_once_value(builder, ir_constant(0.0)) for _ in range(count)]
        with cgutils.for_range(builder, groups) as loop:
            piece = ir_offset(builder, codes, loop.index, 64 * vectors)
            for line in range(vectors):
                ir_prefetch(builder, ir_offset(builder, piece, 1, AHEAD_BYTES + 64 * line))
            step = ir_offset(builder, ir.Constant(I64, 0), loop.index, GROUP)
            rest = builder.add(width, ir_offset(builder, ir.Constant(I64, 0), loop.index, 8))
            starts = [builder.add(place, step) for place in places]
            tails = [builder.add(place, rest) for place in places]
            totals = [[ir_integers(0) for _ in range(chains)] for _ in range(count)]
            if not is_four:
                for r in range(count):
                    shift = ir_load(builder, builder.add(tails[r], ir.Constant(I64, 4)), I32)
                    totals[r][0] = ir_splat(builder, shift)
            for v in range(vectors):
                words = ir_load(builder, ir_offset(builder, piece, v, 64), VI)
                parts = [words]
                if is_four:
                    low = ir_integers(0x0F0F0F0F)
                    high = builder.lshr(words, ir_integers(4))
                    parts = [builder.and_(words, low), builder.and_(high, low)]
                for h, part in enumerate(parts):
                    index = v * len(parts) + h
                    for r in range(count):
                        place = builder.add(starts[r], ir.Constant(I64, 4 * index))
                        word = ir_splat(builder, ir_load(builder, place, I32))
                        chain = index % chains
                        totals[r][chain] = ir_byte_dot(builder, totals[r][chain], part, word)
            halves = ir_load(builder, ir_offset(builder, scales, loop.index, 32), _HALF, 2)
            scale = builder.fpext(halves, VF)
            if is_four:
                halves = ir_load(builder, ir_offset(builder, offsets, loop.index, 32), _HALF, 2)
                offset = builder.fpext(halves, VF)
            for r in range(count):
                total = totals[r][0]
                for other in totals[r][1:]:
                    total = builder.add(total, other)
                factor = ir_splat(builder, ir_load(builder, tails[r], F32))
                value = ir_fma(
                    builder,
                    builder.sitofp(total, VF),
                    builder.fmul(scale, factor),
                    builder.load(sums[r]),
                )
                if is_four:
                    place = builder.add(tails[r], ir.Constant(I64, 4))
                    codes_sum = ir_splat(builder, ir_load(builder, place, F32))
                    value = ir_fma(builder, offset, codes_sum, value)
                builder.store(value, sums[r])
        start = ir_load(builder, bias, VF)
        zero = ir.Constant(I64, 0)
        for r in range(count // summed):
            value = builder.load(sums[r * summed])
            if summed == 2:
                value = builder.fadd(value, builder.load(sums[r * summed + 1]))
            value = builder.fadd(value, start)
            ir_write(builder, is_bf16, value, ir_offset(builder, out, r, out_row), zero)
        return context.get_dummy_value()

    return types.void(bits, planes, bf16, rows, *[types.int64] * 8), codegen


@vector_intrinsic
def quantise_row(context, bits, planes, bf16, x, groups, out, out_row):
    """A row as signed bytes, one scale for each group of 32, and what their weights' offset needs.

    bits (of the weights), planes and bf16 (of x) are literals. out: 32 * groups bytes, then for
    each group its scale (fp32) and with 4 bits scale * sum of its codes (fp32), with 8 bits
    -128 * sum (int32). With two planes a second row, of what rounding left, follows at out_row.
    """
    is_four, is_bf16 = bits.literal_value == 4, bool(bf16.literal_value)

    def codegen(context, builder, signature, args):
        x, groups, out, out_row = args[3:]

        def plane(values: list[Any], index: Any, out: Any) -> list[Any]:
            """Write one group of one plane; returns what its rounding left."""
            sizes = [ir_call(builder, "llvm.fabs.v16f32", VF, [value]) for value in values]
            both = ir_call(builder, "llvm.maxnum.v16f32", VF, sizes)
            top = ir_call(builder, "llvm.vector.reduce.fmax.v16f32", F32, [both])
            scale = builder.fmul(top, ir.Constant(F32, 1.0 / 127.0))
            empty = builder.fcmp_ordered("<", top, ir.Constant(F32, 1e-30))  # 127 / top is finite
            inverse = builder.fdiv(ir.Constant(F32, 127.0), top)
            inverse = ir_splat(builder, builder.select(empty, ir.Constant(F32, 0.0), inverse))
            total, rest = ir_integers(0), []
            place = ir_offset(builder, out, index, GROUP)
            for half, value in enumerate(values):
                scaled = builder.fmul(value, inverse)
                near = ir_call(builder, "llvm.nearbyint.v16f32", VF, [scaled])
                rest.append(ir_fma(builder, builder.fneg(near), ir_splat(builder, scale), value))
                codes = builder.fptosi(near, VI)
                total = builder.add(total, codes)
                target = builder.add(place, ir.Constant(I64, LANES * half))
                ir_store(builder, builder.trunc(codes, _CODES), target, 1)
            summed = ir_call(builder, "llvm.vector.reduce.add.v16i32", I32, [total])
            tail = ir_offset(builder, ir_offset(builder, out, groups, GROUP), index, 8)
            ir_store(builder, scale, tail)
            if is_four:
                offset = builder.fmul(scale, builder.sitofp(summed, F32))
            else:
                offset = builder.mul(summed, ir.Constant(I32, -128))
            ir_store(builder, offset, builder.add(tail, ir.Constant(I64, 4)))
            return rest

        with cgutils.for_range(builder, groups) as loop:
            first = builder.shl(loop.index, ir.Constant(I64, 1))
            second = builder.add(first, ir.Constant(I64, 1))
            values = [ir_read(builder, is_bf16, x, index) for index in (first, second)]
            rest = plane(values, loop.index, out)
            if planes.literal_value == 2:
                plane(rest, loop.index, builder.add(out, out_row))
        return context.get_dummy_value()

    return types.void(bits, planes, bf16, *[types.int64] * 4), codegen
