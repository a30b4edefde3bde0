"""Vector building blocks with keys as lanes: for the few rows of a decoding sequence.

What `vector_ir` says of addresses and strides holds here. K is re-laid in registers, 16 keys to a
vector, and V is read as it lies, so that neither is written anywhere on its way.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from kernels.vector_ir import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    VECTOR_BYTES,
    VF,
    VI,
    cgutils,
    ir_call,
    ir_choose,
    ir_constant,
    ir_dot,
    ir_exp2,
    ir_fma,
    ir_integers,
    ir_load,
    ir_max,
    ir_offset,
    ir_splat,
    ir_store,
    vector_intrinsic,
)

MAX_BLOCK = 4  # rows whose accumulators fit the registers beside the keys


def _shuffle(builder: Any, one: Any, two: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return builder.shuffle_vector(one, two, mask)


def _zip_lanes(width: int, high: int) -> list[int]:
    """Within each 128 bits, `width` words of one, then of two, from the low or the high half."""
    quarter = [[high + i, 16 + high + i] for i in range(2)] if width == 1 else []
    if width == 2:
        quarter = [[high, high + 1], [16 + high, 16 + high + 1]]
    return [4 * lane + i for lane in range(4) for pair in quarter for i in pair]


def _halves(start: int) -> list[int]:
    """128 bits `start` and start + 2 of one, then of two."""
    return [
        base + 4 * lane + i for base in (0, 16) for lane in (start, start + 2) for i in range(4)
    ]


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors of 16 words: column i of the matrix becomes vector i."""
    words: list[Any] = []
    for k in range(0, 16, 4):
        pairs = [
            _shuffle(builder, rows[i], rows[i + 1], _zip_lanes(1, high))
            for i in (k, k + 2)
            for high in (0, 2)
        ]
        for i in (0, 1):
            for high in (0, 2):
                words.append(_shuffle(builder, pairs[i], pairs[i + 2], _zip_lanes(2, high)))
    columns: list[Any] = [None] * 16
    for c in range(4):
        one, two, three, four = (words[4 * k + c] for k in range(4))
        for start in (0, 1):
            low = _shuffle(builder, one, two, _halves(start))
            high = _shuffle(builder, three, four, _halves(start))
            columns[4 * start + c] = _shuffle(builder, low, high, _halves(0))
            columns[4 * (start + 2) + c] = _shuffle(builder, low, high, _halves(1))
    return columns


@vector_intrinsic
def key_scores(context, pairs, rows, keys, key_row, queries, query_row, words, out, out_row):
    """out[r, 0..15] = sum_i queries[r, i] * keys[0..15, i] of `words` 32-bit words a row.

    pairs (a literal) as in tile_product; rows 1 to MAX_BLOCK; words a multiple of 8.
    """
    is_pairs = bool(pairs.literal_value)

    def codegen(context, builder, signature, args):
        _, rows, keys, key_row, queries, query_row, words, out, out_row = args

        def emit(num_rows: int) -> None:
            sums = [
                [cgutils.alloca_once_value(builder, ir_constant(0.0)) for _ in range(2)]
                for _ in range(num_rows)
            ]

            def block(place: Any, count: int) -> None:
                kind = ir.VectorType(I32, count)
                lines = []
                for i in range(16):
                    row = builder.add(ir_offset(builder, keys, i, key_row), place)
                    line = ir_load(builder, row, kind)
                    if count < 16:
                        line = _shuffle(builder, line, line, [i % count for i in range(16)])
                    lines.append(line)
                columns = _transpose(builder, lines)
                for r in range(num_rows):
                    row = builder.add(ir_offset(builder, queries, r, query_row), place)
                    for i in range(count):
                        at = builder.add(row, ir.Constant(I64, 4 * i))
                        word = ir_splat(builder, ir_load(builder, at, I32))
                        total = sums[r][i % 2]
                        result = ir_dot(builder, is_pairs, builder.load(total), columns[i], word)
                        builder.store(result, total)

            whole = builder.lshr(words, ir.Constant(I64, 4))
            with cgutils.for_range(builder, whole) as loop:
                block(builder.shl(loop.index, ir.Constant(I64, 6)), 16)
            rest = builder.and_(words, ir.Constant(I64, 8))
            with builder.if_then(builder.icmp_signed("!=", rest, ir.Constant(I64, 0))):
                block(builder.shl(whole, ir.Constant(I64, 6)), 8)
            for r in range(num_rows):
                total = builder.fadd(builder.load(sums[r][0]), builder.load(sums[r][1]))
                ir_store(builder, total, ir_offset(builder, out, r, out_row))

        ir_choose(builder, rows, range(1, MAX_BLOCK + 1), emit)
        return context.get_dummy_value()

    return types.void(pairs, *[types.int64] * 8), codegen


@vector_intrinsic
def softmax_row(context, pairs, scores, keys, seen, scale, top, total, factor):
    """One row's scores of a tile -> weights in their place; updates its running maximum and sum.

    pairs (a literal) = 1: weights rounded to bf16, one after another, else fp32; those past the
    first `seen` keys are 0, up to `keys` rounded up to 16. scale fp32 turns scores into base-2
    logarithms; top, total: the running state, updated; factor: written, what earlier sums are
    multiplied by; total sums what is stored.
    """
    is_pairs = bool(pairs.literal_value)

    def codegen(context, builder, signature, args):
        _, scores, keys, seen, scale, top, total, factor = args
        lowest = float("-inf")
        limit = ir_splat(builder, builder.trunc(seen, I32))
        lanes = ir.Constant(VI, list(range(LANES)))
        slope = ir_splat(builder, scale)
        vectors = builder.lshr(builder.add(keys, ir.Constant(I64, 15)), ir.Constant(I64, 4))

        def score(index: Any) -> Any:
            value = ir_load(builder, ir_offset(builder, scores, index, VECTOR_BYTES), VF)
            first = ir_splat(builder, builder.trunc(builder.shl(index, ir.Constant(I64, 4)), I32))
            visible = builder.icmp_signed("<", builder.add(first, lanes), limit)
            return builder.select(visible, value, ir_constant(lowest))

        peak = cgutils.alloca_once_value(builder, ir_constant(lowest))
        with cgutils.for_range(builder, vectors) as loop:
            builder.store(ir_max(builder, score(loop.index), builder.load(peak)), peak)
        highest = ir_call(builder, "llvm.vector.reduce.fmax.v16f32", F32, [builder.load(peak)])
        before = ir_load(builder, top, F32)
        after = builder.fmul(highest, scale)
        after = builder.select(builder.fcmp_ordered(">", after, before), after, before)
        finite = builder.fcmp_ordered(">", after, ir.Constant(F32, lowest))
        anchor = ir_splat(builder, builder.select(finite, after, ir.Constant(F32, 0.0)))
        shrink = ir_exp2(builder, builder.fsub(ir_splat(builder, before), anchor))
        shrink = builder.extract_element(shrink, ir.Constant(I32, 0))
        negated = builder.fneg(anchor)
        added = cgutils.alloca_once_value(builder, ir_constant(0.0))
        with cgutils.for_range(builder, vectors) as loop:
            value = ir_exp2(builder, ir_fma(builder, score(loop.index), slope, negated))
            if is_pairs:
                bits = builder.add(builder.bitcast(value, VI), ir_integers(0x8000))
                half = builder.trunc(builder.lshr(bits, ir_integers(16)), ir.VectorType(I16, LANES))
                value = builder.bitcast(builder.and_(bits, ir_integers(-0x10000)), VF)
                ir_store(builder, half, ir_offset(builder, scores, loop.index, 2 * LANES), 2)
            else:
                ir_store(builder, value, ir_offset(builder, scores, loop.index, VECTOR_BYTES))
            builder.store(builder.fadd(builder.load(added), value), added)
        whole = ir_call(
            builder,
            "llvm.vector.reduce.fadd.v16f32",
            F32,
            [ir.Constant(F32, 0.0), builder.load(added)],
        )
        kept = builder.fmul(ir_load(builder, total, F32), shrink)
        ir_store(builder, after, top)
        ir_store(builder, shrink, factor)
        ir_store(builder, builder.fadd(kept, whole), total)
        return context.get_dummy_value()

    kinds = [types.int64] * 3 + [types.float32] + [types.int64] * 3
    return types.void(pairs, *kinds), codegen


@vector_intrinsic
def value_sums(
    context,
    pairs,
    vectors,
    rows,
    weights,
    weight_row,
    values,
    value_row,
    zeros,
    keys,
    sums,
    sum_row,
    factors,
):
    """sums[r, :] = sums[r, :] * factors[r] + sum_j weights[r, j] * values[j, :], 16 * vectors wide.

    pairs and vectors (1 or 4) are literals; rows 1 to MAX_BLOCK; pairs = 1: weights and values are
    bf16. zeros: the address of a row of zeros, beside an odd last key.
    """
    is_pairs, num_vectors = bool(pairs.literal_value), vectors.literal_value
    lanes = 2 * LANES if num_vectors > 1 else LANES  # bf16 numbers of a load

    def codegen(context, builder, signature, args):
        _, _, rows, weights, weight_row, values, value_row, zeros, keys, sums, sum_row, factors = (
            args
        )
        one = ir.Constant(I64, 1)

        def read_pairs(index: Any) -> list[Any]:
            first = builder.shl(index, one)
            place = ir_offset(builder, values, first, value_row)
            follows = builder.icmp_signed("<", builder.add(first, one), keys)
            after = builder.select(follows, builder.add(place, value_row), zeros)
            words = []
            for load in range(num_vectors * LANES // lanes):
                at = ir.Constant(I64, load * 2 * lanes)
                kind = ir.VectorType(I16, lanes)
                low = ir_load(builder, builder.add(place, at), kind, 2)
                high = ir_load(builder, builder.add(after, at), kind, 2)
                for part in range(0, lanes, LANES):
                    zipped = [x for i in range(part, part + LANES) for x in (i, lanes + i)]
                    words.append(builder.bitcast(_shuffle(builder, low, high, zipped), VI))
            return words

        def read_floats(index: Any) -> list[Any]:
            place = ir_offset(builder, values, index, value_row)
            return [
                ir_load(builder, builder.add(place, ir.Constant(I64, j * VECTOR_BYTES)), VI)
                for j in range(num_vectors)
            ]

        def emit(num_rows: int) -> None:
            cells = [(r, j) for r in range(num_rows) for j in range(num_vectors)]
            outs = {
                (r, j): builder.add(
                    ir_offset(builder, sums, r, sum_row), ir.Constant(I64, j * VECTOR_BYTES)
                )
                for r, j in cells
            }
            totals = {}
            for r, j in cells:
                scale = ir_splat(builder, ir_load(builder, ir_offset(builder, factors, r, 4), F32))
                start = builder.fmul(ir_load(builder, outs[r, j], VF), scale)
                totals[r, j] = cgutils.alloca_once_value(builder, start)
            count = builder.lshr(builder.add(keys, one), one) if is_pairs else keys
            with cgutils.for_range(builder, count) as loop:
                words = read_pairs(loop.index) if is_pairs else read_floats(loop.index)
                for r in range(num_rows):
                    at = ir_offset(builder, weights, r, weight_row)
                    at = builder.add(at, builder.shl(loop.index, ir.Constant(I64, 2)))
                    word = ir_splat(builder, ir_load(builder, at, I32))
                    for j in range(num_vectors):
                        total = totals[r, j]
                        result = ir_dot(builder, is_pairs, builder.load(total), words[j], word)
                        builder.store(result, total)
            for cell in cells:
                ir_store(builder, builder.load(totals[cell]), outs[cell])

        ir_choose(builder, rows, range(1, MAX_BLOCK + 1), emit)
        return context.get_dummy_value()

    return types.void(pairs, vectors, *[types.int64] * 10), codegen
