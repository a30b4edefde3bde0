"""Passes over one row of logits, written as LLVM IR. Pointers are addresses (int64)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from kernels.row_ir import ir_read
from kernels.vector_ir import (
    F32,
    I32,
    VECTOR_BYTES,
    VI,
    cgutils,
    ir_call,
    ir_constant,
    ir_exp2,
    ir_integers,
    ir_max,
    ir_offset,
    ir_pointer,
    ir_splat,
    ir_store,
    vector_intrinsic,
)

_F64 = ir.DoubleType()
_WIDE = ir.VectorType(_F64, 16)


@vector_intrinsic
def largest(context, bf16, x, vectors):
    """The largest of 16 * vectors numbers; NaN when one of them is. bf16 is a literal."""
    is_bf16 = bool(bf16.literal_value)

    def codegen(context, builder, signature, args):
        _, x, vectors = args
        best = cgutils.alloca_once_value(builder, ir_constant(float("-inf")))
        bad = cgutils.alloca_once_value(builder, ir_integers(0))
        with cgutils.for_range(builder, vectors) as loop:
            value = ir_read(builder, is_bf16, x, loop.index)
            builder.store(ir_max(builder, value, builder.load(best)), best)
            unordered = builder.zext(builder.fcmp_unordered("uno", value, value), VI)
            builder.store(builder.or_(builder.load(bad), unordered), bad)
        top = ir_call(builder, "llvm.vector.reduce.fmax.v16f32", F32, [builder.load(best)])
        any_bad = ir_call(builder, "llvm.vector.reduce.or.v16i32", I32, [builder.load(bad)])
        is_bad = builder.icmp_signed("!=", any_bad, ir.Constant(I32, 0))
        return builder.select(is_bad, ir.Constant(F32, float("nan")), top)

    return types.float32(bf16, types.int64, types.int64), codegen


@vector_intrinsic
def weigh(context, bf16, x, out, vectors, top, slope):
    """out = 2 ** ((x - top) * slope), fp32; returns their sum in fp64. bf16 is a literal."""
    is_bf16 = bool(bf16.literal_value)

    def codegen(context, builder, signature, args):
        _, x, out, vectors, top, slope = args
        total = cgutils.alloca_once_value(builder, ir.Constant(_WIDE, [0.0] * 16))
        low, steep = ir_splat(builder, top), ir_splat(builder, slope)
        with cgutils.for_range(builder, vectors) as loop:
            value = ir_read(builder, is_bf16, x, loop.index)
            value = builder.fmul(builder.fsub(value, low), steep)
            value = ir_exp2(builder, value)
            ir_store(builder, value, ir_offset(builder, out, loop.index, VECTOR_BYTES))
            wide = builder.fpext(value, _WIDE)
            builder.store(builder.fadd(builder.load(total), wide), total)
        zero = ir.Constant(_F64, 0.0)
        lanes = builder.load(total)
        for index in range(16):
            zero = builder.fadd(zero, builder.extract_element(lanes, ir.Constant(I32, index)))
        return zero

    kinds = [types.int64] * 3 + [types.float32] * 2
    return types.float64(bf16, *kinds), codegen


@vector_intrinsic
def widen(context, bf16, x, out, vectors):
    """Copy 16 * vectors numbers as fp32. bf16 is a literal."""
    is_bf16 = bool(bf16.literal_value)

    def codegen(context, builder, signature, args):
        _, x, out, vectors = args
        with cgutils.for_range(builder, vectors) as loop:
            value = ir_read(builder, is_bf16, x, loop.index)
            ir_store(builder, value, ir_offset(builder, out, loop.index, VECTOR_BYTES))
        return context.get_dummy_value()

    return types.void(bf16, *[types.int64] * 3), codegen


def _pointer(kind: Any, numba_type: Any) -> Any:
    @vector_intrinsic
    def pointer(context, address):
        def codegen(context, builder, signature, args):
            return ir_pointer(builder, args[0], kind)

        return types.CPointer(numba_type)(types.int64), codegen

    return pointer


float32_pointer = _pointer(F32, types.float32)
float64_pointer = _pointer(_F64, types.float64)
int32_pointer = _pointer(I32, types.int32)
