"""A register tile of dot products: the inner loop of every product on a CPU."""

from std.sys import simd_width_of, size_of

from .matrix import INTO_FIRST_CACHE, Matrix

comptime LANES = simd_width_of[DType.float32]()
comptime Lanes = SIMD[DType.float32, LANES]

comptime TILE_OUTS = 2 if LANES == 8 else 4
"""Weight rows of a tile. With 6 rows of x that is 24 sums, which AVX-512's and NEON's
32 registers hold beside their operands; AVX2 has 16 registers."""

comptime TILE_ROWS = 6
"""The most rows of x of a tile."""

comptime MIN_CHAINS = 8
"""Sums that grow side by side: a fused multiply-add takes four cycles and two start
in each, so fewer would leave the units waiting for one another."""

comptime AHEAD_BYTES = 2048
"""How far ahead of the products weights are asked for, in each row of a tile. The next
row of a row-major matrix follows in memory, so this is what the same thread reads soon.
Left alone, a core has no more reads under way than its window of instructions holds,
which for bfloat16, at three instructions a half line, is half of what memory could
deliver."""

comptime LINE_BYTES = 64


@always_inline
def tile[
    rows: Int, outs: Int, streams: Bool, dtype: DType
](
    y: Matrix[DType.float32],
    x: Matrix[DType.float32],
    w: Matrix[dtype],
    inner: Int,
    low: Matrix[DType.float32],
    u: Matrix[dtype],
    rank: Int,
    adds: Bool,
    apart: Int,
):
    """Write ``y = x·wᵀ + low·uᵀ`` for a few rows and columns, or add that to y.

    Parameters:
        rows: Rows of x, `low` and y.
        outs: Rows of w and u, and columns of y.
        streams: Whether w and u come from memory, and should be asked for ahead.
        dtype: Storage dtype of w and u; they are widened in registers.

    Args:
        y: ``[rows, out]``; columns 0, `apart`, 2·`apart` and so on are written.
        x: ``[rows, inner]``.
        w: ``[out, inner]``; the rows of the same numbers are read.
        inner: Columns of x and w.
        low: ``[rows, rank]``, not looked at if the rank is 0.
        u: ``[out, rank]``, likewise.
        rank: Columns of `low` and u.
        adds: Whether to add to what y holds.
        apart: From one column of y, and row of w and u, to the next.
    """
    comptime depth = max(1, MIN_CHAINS // (rows * outs))
    # One set of sums for both products: what costs is their reduction to scalars.
    var sums = Array[Lanes, depth * outs * rows](fill=Lanes(0))
    var base = w.every(apart)
    var factor = u.every(apart)
    var done = _add_products[rows, outs, depth, streams](sums, x, base, inner)
    var low_done = _add_products[rows, outs, depth, streams](sums, low, factor, rank)
    # Tested once: widths are whole vectors almost always, and 24 tests would cost
    # a quarter of the products.
    var has_rest = done < inner or low_done < rank
    comptime for o in range(outs):
        comptime for r in range(rows):
            var lanes = sums[o * rows + r]
            comptime for d in range(1, depth):
                lanes += sums[(d * outs + o) * rows + r]
            var value = lanes.reduce_add()
            if has_rest:
                value += _rest(x.part(r), base.part(o), done, inner)
                value += _rest(low.part(r), factor.part(o), low_done, rank)
            if adds:
                value += y.load[1](r, o * apart)[0]
            y.store(r, o * apart, value)


@always_inline
def _add_products[
    rows: Int, outs: Int, depth: Int, streams: Bool, dtype: DType
](
    mut sums: Array[Lanes, depth * outs * rows],
    x: Matrix[DType.float32],
    w: Matrix[dtype],
    inner: Int,
) -> Int:
    """Add up products of whole vectors; return the column where they end."""
    var column = 0
    while column + LANES * depth <= inner:
        comptime for d in range(depth):
            _add_step[rows, outs, d, streams](sums, x, w, column + d * LANES)
        column += LANES * depth
    while column + LANES <= inner:
        _add_step[rows, outs, 0, streams](sums, x, w, column)
        column += LANES
    return column


@always_inline
def _add_step[
    rows: Int, outs: Int, chain: Int, streams: Bool, dtype: DType, size: Int
](
    mut sums: Array[Lanes, size],
    x: Matrix[DType.float32],
    w: Matrix[dtype],
    column: Int,
):
    comptime bytes = size_of[Scalar[dtype]]()
    comptime begins_line = chain * LANES * bytes % LINE_BYTES < LANES * bytes
    comptime for o in range(outs):
        comptime if streams and begins_line:
            w.prefetch[INTO_FIRST_CACHE](o, column + AHEAD_BYTES // bytes)
        var weights = w.load[LANES](o, column)
        comptime for r in range(rows):
            comptime at = (chain * outs + o) * rows + r
            sums[at] = x.load[LANES](r, column).fma(weights, sums[at])


def _rest[
    dtype: DType
](x: Matrix[DType.float32], w: Matrix[dtype], start: Int, inner: Int) -> Float32:
    """Return the dot product of the columns that fill no vector."""
    comptime half = LANES // 2
    var column = start
    var total = Float32(0)
    if column + half <= inner:
        total += (x.load[half](0, column) * w.load[half](0, column)).reduce_add()
        column += half
    while column < inner:
        total += x.load[1](0, column)[0] * w.load[1](0, column)[0]
        column += 1
    return total
