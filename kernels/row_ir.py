"""Row operations for Numba kernels, written as LLVM IR: one row of fp32 or bf16 in, one out.

Pointers are addresses (int64). `vectors` counts 16 elements each. bf16 = 1 (a literal) reads and
writes bf16, rounding to nearest even; arithmetic is fp32 throughout.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from kernels.vector_ir import (
    F32,
    I16,
    I64,
    LANES,
    VECTOR_BYTES,
    VF,
    VI,
    cgutils,
    ir_call,
    ir_constant,
    ir_exp2,
    ir_fma,
    ir_integers,
    ir_load,
    ir_offset,
    ir_splat,
    ir_store,
    vector_intrinsic,
)

_HALF = ir.VectorType(I16, LANES)


def _widen(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, VI), ir_integers(16)), VF)


def _round(builder: Any, value: Any) -> Any:
    """fp32 -> bf16 bits, to nearest even."""
    bits = builder.bitcast(value, VI)
    odd = builder.and_(builder.lshr(bits, ir_integers(16)), ir_integers(1))
    bits = builder.add(bits, builder.add(odd, ir_integers(0x7FFF)))
    return builder.trunc(builder.lshr(bits, ir_integers(16)), _HALF)


def ir_read(builder: Any, bf16: bool, address: Any, index: Any) -> Any:
    if bf16:
        return _widen(builder, ir_load(builder, ir_offset(builder, address, index, 32), _HALF, 2))
    return ir_load(builder, ir_offset(builder, address, index, VECTOR_BYTES), VF)


def ir_write(builder: Any, bf16: bool, value: Any, address: Any, index: Any) -> None:
    if bf16:
        place = ir_offset(builder, address, index, 32)
        ir_store(builder, _round(builder, value), place, 2)
    else:
        ir_store(builder, value, ir_offset(builder, address, index, VECTOR_BYTES))


def _rounded(builder: Any, bf16: bool, value: Any) -> Any:
    return _widen(builder, _round(builder, value)) if bf16 else value


@vector_intrinsic
def rms_norm_row(context, bf16, adds, x, residual, weight, out, vectors, inverse_dim, eps):
    """out = weight * cast(x * rsqrt(mean(x^2) + eps)); adds = 1: x += residual, written there.

    bf16 and adds are literals; inverse_dim and eps fp32.
    """
    is_bf16, is_adding = bool(bf16.literal_value), bool(adds.literal_value)

    def codegen(context, builder, signature, args):
        _, _, x, residual, weight, out, vectors, inverse_dim, eps = args
        squares = cgutils.alloca_once_value(builder, ir_constant(0.0))
        with cgutils.for_range(builder, vectors) as loop:
            value = ir_read(builder, is_bf16, x, loop.index)
            if is_adding:
                value = builder.fadd(value, ir_read(builder, is_bf16, residual, loop.index))
                value = _rounded(builder, is_bf16, value)
                ir_write(builder, is_bf16, value, residual, loop.index)
            builder.store(ir_fma(builder, value, value, builder.load(squares)), squares)
        zero = ir.Constant(F32, 0.0)
        total = ir_call(
            builder, "llvm.vector.reduce.fadd.v16f32", F32, [zero, builder.load(squares)]
        )
        mean = builder.fadd(builder.fmul(total, inverse_dim), eps)
        root = ir_call(builder, "llvm.sqrt.f32", F32, [mean])
        ratio = ir_splat(builder, builder.fdiv(ir.Constant(F32, 1.0), root))
        source = residual if is_adding else x
        with cgutils.for_range(builder, vectors) as loop:
            value = builder.fmul(ir_read(builder, is_bf16, source, loop.index), ratio)
            value = _rounded(builder, is_bf16, value)
            value = builder.fmul(value, ir_read(builder, is_bf16, weight, loop.index))
            ir_write(builder, is_bf16, value, out, loop.index)
        return context.get_dummy_value()

    kinds = [types.int64] * 5 + [types.float32] * 2
    return types.void(bf16, adds, *kinds), codegen


@vector_intrinsic
def silu_mul_row(context, bf16, gate, up, out, vectors):
    """out = cast(gate / (1 + exp(-gate))) * up; bf16 is a literal."""
    is_bf16 = bool(bf16.literal_value)

    def codegen(context, builder, signature, args):
        _, gate, up, out, vectors = args
        one = ir_constant(1.0)
        with cgutils.for_range(builder, vectors) as loop:
            value = ir_read(builder, is_bf16, gate, loop.index)
            power = builder.fmul(value, ir_constant(-1.4426950408889634))
            high = builder.fcmp_ordered(">", power, ir_constant(126.0))
            power = builder.select(high, ir_constant(126.0), power)
            below = builder.fadd(one, ir_exp2(builder, power))
            value = _rounded(builder, is_bf16, builder.fdiv(value, below))
            value = builder.fmul(value, ir_read(builder, is_bf16, up, loop.index))
            ir_write(builder, is_bf16, value, out, loop.index)
        return context.get_dummy_value()

    return types.void(bf16, *[types.int64] * 4), codegen


@vector_intrinsic
def weighted_sum(context, bf16, places, weights, count, out, vectors):
    """out = sum_p weights[p] * row p of fp32 rows, whose addresses are the int64 `places`.

    bf16 (a literal) is that of `out`; weights fp32; count 0 gives zeros.
    """
    is_bf16 = bool(bf16.literal_value)

    def codegen(context, builder, signature, args):
        _, places, weights, count, out, vectors = args
        with cgutils.for_range(builder, vectors) as loop:
            total = cgutils.alloca_once_value(builder, ir_constant(0.0))
            with cgutils.for_range(builder, count) as rows:
                place = ir_load(builder, ir_offset(builder, places, rows.index, 8), I64)
                weight = ir_load(builder, ir_offset(builder, weights, rows.index, 4), F32)
                value = ir_read(builder, False, place, loop.index)
                sum_so_far = builder.load(total)
                builder.store(ir_fma(builder, value, ir_splat(builder, weight), sum_so_far), total)
            ir_write(builder, is_bf16, builder.load(total), out, loop.index)
        return context.get_dummy_value()

    return types.void(bf16, *[types.int64] * 5), codegen


@vector_intrinsic
def rotate_row(context, bf16, lanes, x, cos, sin, out, half, groups):
    """Half-split rotary embedding of one head: out may be x; cos and sin fp32.

    bf16 and lanes are literals; half = head_dim / 2 elements = lanes * groups.
    """
    is_bf16, width = bool(bf16.literal_value), lanes.literal_value
    size = 2 if is_bf16 else 4
    wide, half_kind = ir.VectorType(F32, width), ir.VectorType(I16, width)
    bits_kind = ir.VectorType(ir.IntType(32), width)

    def codegen(context, builder, signature, args):
        _, _, x, cos, sin, out, half, groups = args

        def number(value: int) -> Any:
            return ir.Constant(bits_kind, [value] * width)

        def read(address: Any) -> Any:
            if not is_bf16:
                return ir_load(builder, address, wide)
            bits = builder.zext(ir_load(builder, address, half_kind, 2), bits_kind)
            return builder.bitcast(builder.shl(bits, number(16)), wide)

        def write(value: Any, address: Any) -> None:
            if not is_bf16:
                ir_store(builder, value, address)
                return
            bits = builder.bitcast(value, bits_kind)
            odd = builder.and_(builder.lshr(bits, number(16)), number(1))
            bits = builder.lshr(builder.add(bits, builder.add(odd, number(0x7FFF))), number(16))
            ir_store(builder, builder.trunc(bits, half_kind), address, 2)

        across = builder.mul(half, ir.Constant(I64, size))
        with cgutils.for_range(builder, groups) as loop:
            place = builder.mul(loop.index, ir.Constant(I64, width * size))
            angle = builder.mul(loop.index, ir.Constant(I64, width * 4))
            c = ir_load(builder, builder.add(cos, angle), wide)
            s = ir_load(builder, builder.add(sin, angle), wide)
            low_at = builder.add(x, place)
            low, high = read(low_at), read(builder.add(low_at, across))
            out_at = builder.add(out, place)
            write(builder.fsub(builder.fmul(low, c), builder.fmul(high, s)), out_at)
            write(
                builder.fadd(builder.fmul(high, c), builder.fmul(low, s)),
                builder.add(out_at, across),
            )
        return context.get_dummy_value()

    return types.void(bf16, lanes, *[types.int64] * 6), codegen


@vector_intrinsic
def copy_row(context, source, target, size):
    """Copy `size` bytes."""

    def codegen(context, builder, signature, args):
        source, target, size = args
        byte = ir.PointerType(ir.IntType(8))
        cgutils.raw_memcpy(
            builder, builder.inttoptr(target, byte), builder.inttoptr(source, byte), size, 1
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@vector_intrinsic
def copy_vectors(context, source, target, count):
    """Copy `count` times 32 bytes, in line: for rows too short to be worth a call."""

    def codegen(context, builder, signature, args):
        source, target, count = args
        with cgutils.for_range(builder, count) as loop:
            value = ir_load(builder, ir_offset(builder, source, loop.index, 32), _HALF, 2)
            ir_store(builder, value, ir_offset(builder, target, loop.index, 32), 2)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen
