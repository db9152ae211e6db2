"""Products on a CPU: which tiles make up a matrix, and who computes which."""

from max.algorithm import sync_parallelize
from max.gpu.host.device_context import DeviceContextBase
from max.runtime.asyncrt import parallelism_level
from std.sys import CompilationTarget

from .matrix import Matrix
from .tile import TILE_OUTS, TILE_ROWS, tile

comptime HostContext = DeviceContextBase[CompilationTarget()]

comptime BLOCK_ELEMENTS = 1 << 17
"""Elements of x that one pass over the weights serves: 512 KiB, which a core's own
cache holds beside the weights that stream through it."""

comptime MIN_BLOCK_ROWS = 16
"""However wide x is, so many rows share a pass over the weights."""

comptime MIN_TASK_PRODUCTS = 1 << 15
"""Multiplications that are worth waking a second thread for."""


def task_count(products: Int, host: HostContext) -> Int:
    """Return how many tasks some multiplications should be split into."""
    return max(1, min(parallelism_level(host), products // MIN_TASK_PRODUCTS))


def multiply_share[
    dtype: DType
](
    y: Matrix[DType.float32],
    x: Matrix[DType.float32],
    w: Matrix[dtype],
    inner: Int,
    low: Matrix[DType.float32],
    u: Matrix[dtype],
    rank: Int,
    rows: Int,
    first: Int,
    last: Int,
):
    """Write columns `first` to `last` of ``y = x·wᵀ + low·uᵀ``.

    Args:
        y: ``[rows, out]``.
        x: ``[rows, inner]``.
        w: ``[out, inner]``.
        inner: Columns of x and w.
        low: ``[rows, rank]``.
        u: ``[out, rank]``.
        rank: Columns of `low` and u; with 0 there is no second product.
        rows: Rows of x.
        first: The first row of w to work on.
        last: The row of w to stop before.
    """
    var block = max(MIN_BLOCK_ROWS, BLOCK_ELEMENTS // max(1, inner))
    for row in range(0, rows, block):
        var end = min(row + block, rows)
        var column = first
        while column + TILE_OUTS <= last:
            _multiply_rows[TILE_OUTS](y, x, w, inner, low, u, rank, row, end, column)
            column += TILE_OUTS
        while column < last:
            _multiply_rows[1](y, x, w, inner, low, u, rank, row, end, column)
            column += 1


@always_inline
def _multiply_rows[
    outs: Int, dtype: DType
](
    y: Matrix[DType.float32],
    x: Matrix[DType.float32],
    w: Matrix[dtype],
    inner: Int,
    low: Matrix[DType.float32],
    u: Matrix[dtype],
    rank: Int,
    first: Int,
    last: Int,
    column: Int,
):
    """Write `outs` columns of y for some rows; the weights stay in the first cache."""
    var row = first
    var weights = w.part(column)
    var factors = u.part(column)
    while row + TILE_ROWS <= last:
        tile[TILE_ROWS, outs](
            y.part(row, column), x.part(row), weights, inner, low.part(row), factors, rank
        )
        row += TILE_ROWS
    if row + 2 <= last:
        tile[2, outs](
            y.part(row, column), x.part(row), weights, inner, low.part(row), factors, rank
        )
        row += 2
    if row < last:
        tile[1, outs](
            y.part(row, column), x.part(row), weights, inner, low.part(row), factors, rank
        )
