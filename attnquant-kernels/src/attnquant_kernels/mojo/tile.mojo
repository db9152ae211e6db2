"""A register tile of dot products: the inner loop of every product on a CPU."""

from std.sys import simd_width_of

from .matrix import Matrix

comptime LANES = simd_width_of[DType.float32]()
comptime Lanes = SIMD[DType.float32, LANES]

comptime TILE_OUTS = 2 if LANES == 8 else 4
"""Weight rows of a tile. With 4 rows of x that is 16 sums, which AVX-512's and NEON's
32 registers hold beside their operands; AVX2 has 16 registers."""

comptime TILE_ROWS = 4
"""The most rows of x of a tile."""

comptime MIN_CHAINS = 8
"""Sums that grow side by side: a fused multiply-add takes four cycles and two start
in each, so fewer would leave the units waiting for one another."""


@always_inline
def tile[
    rows: Int, outs: Int, dtype: DType
](
    y: Matrix[DType.float32],
    x: Matrix[DType.float32],
    w: Matrix[dtype],
    inner: Int,
    low: Matrix[DType.float32],
    u: Matrix[dtype],
    rank: Int,
):
    """Write ``y = x·wᵀ + low·uᵀ`` for a few rows and columns.

    Parameters:
        rows: Rows of x, `low` and y.
        outs: Rows of w and u, and columns of y.
        dtype: Storage dtype of w and u; they are widened in registers.

    Args:
        y: ``[rows, outs]``.
        x: ``[rows, inner]``.
        w: ``[outs, inner]``.
        inner: Columns of x and w.
        low: ``[rows, rank]``, not looked at if the rank is 0.
        u: ``[outs, rank]``, likewise.
        rank: Columns of `low` and u.
    """
    comptime depth = max(1, MIN_CHAINS // (rows * outs))
    # One set of sums for both products: what costs is their reduction to scalars.
    var sums = Array[Lanes, depth * outs * rows](fill=Lanes(0))
    var done = _add_products[rows, outs, depth](sums, x, w, inner)
    var low_done = _add_products[rows, outs, depth](sums, low, u, rank)
    comptime for o in range(outs):
        comptime for r in range(rows):
            var lanes = sums[o * rows + r]
            comptime for d in range(1, depth):
                lanes += sums[(d * outs + o) * rows + r]
            var value = lanes.reduce_add()
            value += _rest(x.part(r), w.part(o), done, inner)
            value += _rest(low.part(r), u.part(o), low_done, rank)
            y.store(r, o, value)


@always_inline
def _add_products[
    rows: Int, outs: Int, depth: Int, dtype: DType
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
            _add_step[rows, outs, d](sums, x, w, column + d * LANES)
        column += LANES * depth
    while column + LANES <= inner:
        _add_step[rows, outs, 0](sums, x, w, column)
        column += LANES
    return column


@always_inline
def _add_step[
    rows: Int, outs: Int, chain: Int, dtype: DType, size: Int
](
    mut sums: Array[Lanes, size],
    x: Matrix[DType.float32],
    w: Matrix[dtype],
    column: Int,
):
    comptime for o in range(outs):
        var weights = w.load[LANES](o, column)
        comptime for r in range(rows):
            comptime at = (chain * outs + o) * rows + r
            sums[at] = x.load[LANES](r, column).fma(weights, sums[at])


@always_inline
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
