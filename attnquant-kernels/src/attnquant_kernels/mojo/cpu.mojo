"""Products on a CPU: which tiles make up a matrix, and who computes which."""

from max.algorithm import sync_parallelize
from max.gpu.host.device_context import DeviceContextBase
from max.runtime.asyncrt import parallelism_level
from std.atomic import Atomic
from std.math import align_up, ceildiv
from std.sys import CompilationTarget, size_of

from .matrix import Matrix
from .tile import LANES, TILE_OUTS, TILE_ROWS, tile

comptime HostContext = DeviceContextBase[CompilationTarget()]

comptime PANEL_BYTES = 1 << 18
"""Weights that are worked on before the next: a core's second-level cache holds them
while every block of rows of x meets them."""

comptime BLOCK_ROWS = 2 * TILE_ROWS
comptime BLOCK_COLUMNS = 1024
"""A block of x. Beside a tile of weights it fits the first-level cache (48 KiB): a tile
does 24 multiply-adds for 10 loads, and could not be fed from further away."""

comptime UNSPLIT_ROWS = 4
"""So few rows of x fit the first-level cache whatever their width."""

comptime ONE_ROW_OUTS[dtype: DType] = 4 if dtype == DType.float32 else 2
"""Weight rows of a tile for one row of x; measured, out of cache."""

comptime MIN_TASK_PRODUCTS = 1 << 15
"""Multiplications that are worth waking a second thread for."""


def task_count(products: Int, host: HostContext) -> Int:
    """Return how many tasks some multiplications should be split into."""
    return max(1, min(parallelism_level(host), products // MIN_TASK_PRODUCTS))


@always_inline
def share_columns[
    Work: def(Int, Int, Int) -> None
](
    work: Work, columns: Int, unit: Int, shares: Int, tasks: Int, host: HostContext
) raises:
    """Spread columns over tasks, each of which takes a share when it is done with one:
    cores of a shared machine are not equally fast, and do not begin together.

    Args:
        work: Called with a task's number and the columns to begin with and to stop
            before, by several tasks at once.
        columns: How many there are.
        unit: What shares are a multiple of, the last one apart.
        shares: How many there are for each task, about.
        tasks: How many tasks there are.
        host: Whose threads run them.
    """
    var parts = tasks * shares if tasks > 1 else 1
    var share = max(unit, align_up(ceildiv(columns, parts), unit))
    var taken = Atomic[Int64](0)

    @always_inline
    def run(task: Int) {imm, mut taken}:
        while True:
            var first = Int(taken.fetch_add(1)) * share
            if first >= columns:
                break
            work(task, first, min(first + share, columns))

    sync_parallelize(run, tasks, host)


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
    if rows == 1:
        _multiply_row(y, x, w, inner, low, u, rank, first, last)
        return
    var splits = 1 if rows <= UNSPLIT_ROWS else ceildiv(inner, BLOCK_COLUMNS)
    # In whole vectors: a rest in every part would be slow.
    var part = align_up(ceildiv(inner, max(1, splits)), LANES)
    var panel = max(
        TILE_OUTS, PANEL_BYTES // max(1, min(part, inner) * size_of[Scalar[dtype]]())
    )
    for begin in range(first, last, panel):
        var end = min(begin + panel, last)
        # Once at least, also where x has no columns.
        for k in range(0, max(1, inner), max(1, part)):
            var width = min(part, inner - k)
            var is_last = k + width >= inner
            for row in range(0, rows, BLOCK_ROWS):
                _multiply_block(
                    y.part(row),
                    x.part(row, k),
                    w.part(0, k),
                    width,
                    low.part(row),
                    u,
                    rank if is_last else 0,
                    min(BLOCK_ROWS, rows - row),
                    begin,
                    end,
                    k > 0,
                )


def _multiply_row[
    dtype: DType
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
):
    """Write some columns of y for one row of x: bound by reading w, once, in order."""
    comptime outs = ONE_ROW_OUTS[dtype]
    var column = first
    while column + outs <= last:
        var part = u.part(column)
        tile[1, outs, True](
            y.part(0, column), x, w.part(column), inner, low, part, rank, False
        )
        column += outs
    while column < last:
        var part = u.part(column)
        tile[1, 1, True](
            y.part(0, column), x, w.part(column), inner, low, part, rank, False
        )
        column += 1


def _multiply_block[
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
    adds: Bool,
):
    """Write some columns of y for one block of x, tile by tile."""
    var column = first
    while column + TILE_OUTS <= last:
        _multiply_tiles[TILE_OUTS](
            y.part(0, column),
            x,
            w.part(column),
            inner,
            low,
            u.part(column),
            rank,
            rows,
            adds,
        )
        column += TILE_OUTS
    while column < last:
        _multiply_tiles[1](
            y.part(0, column),
            x,
            w.part(column),
            inner,
            low,
            u.part(column),
            rank,
            rows,
            adds,
        )
        column += 1


@always_inline
def _multiply_tiles[
    outs: Int, dtype: DType
](
    y: Matrix[DType.float32],
    x: Matrix[DType.float32],
    w: Matrix[dtype],
    inner: Int,
    low: Matrix[DType.float32],
    u: Matrix[dtype],
    rank: Int,
    rows: Int,
    adds: Bool,
):
    """Write `outs` columns of y, in as few and as even tiles as the rows allow."""
    var row = 0
    while row < rows:
        var left = rows - row
        var part = y.part(row)
        var terms = low.part(row)
        # Only the first tile finds the weights in memory, if not in a cache.
        if left >= 6 and left != 8:
            tile[6, outs, True](
                part, x.part(row), w, inner, terms, u, rank, adds
            )
            row += 6
        elif left >= 4:
            tile[4, outs, True](
                part, x.part(row), w, inner, terms, u, rank, adds
            )
            row += 4
        elif left >= 2:
            tile[2, outs, True](
                part, x.part(row), w, inner, terms, u, rank, adds
            )
            row += 2
        else:
            tile[1, outs, False](
                part, x.part(row), w, inner, terms, u, rank, adds
            )
            row += 1
