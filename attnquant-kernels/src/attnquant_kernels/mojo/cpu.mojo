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

comptime FEW_ROWS = 3 * TILE_ROWS
"""So many rows of x are one block, which meets every weight while it is in the
first-level cache: reading weights from memory is still the limit."""

comptime STREAMS = 4
"""Weight rows that one row of x meets side by side, each in a part of its own: a core
reads several places at once faster than one, as it follows each by itself, a page at a
time."""

comptime FEW_SHARES = 4
"""Parts of the columns for each thread, at least, where reading weights is the limit:
the begin of a part is read from memory before anything could ask for it."""

comptime SHARE_BYTES = 1 << 20
"""Weights of a part, at most, where reading them is the limit: whoever is done first
waits for no more than another's last part."""

comptime MIN_TASK_PRODUCTS = 1 << 15
"""Multiplications that are worth waking a second thread for."""


def task_count(products: Int, host: HostContext) -> Int:
    """Return how many tasks some multiplications should be split into."""
    return max(1, min(parallelism_level(host), products // MIN_TASK_PRODUCTS))


def few_shares[dtype: DType](weights: Int, tasks: Int) -> Int:
    """Return into how many shares a task some columns should be split, where reading
    their weights is the limit.

    Parameters:
        dtype: Storage dtype of the weights.

    Args:
        weights: How many there are, of all columns.
        tasks: How many tasks there are.
    """
    return max(FEW_SHARES, weights * size_of[Scalar[dtype]]() // SHARE_BYTES // tasks)


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
        last: The row of w to stop before; with none, there is nothing to do.
    """
    if first >= last:
        return
    if rows == 1:
        _multiply_row(y, x, w, inner, low, u, rank, first, last)
        return
    if rows <= FEW_ROWS:
        # Nothing meets the weights again.
        _multiply_block(y, x, w, inner, low, u, rank, rows, first, last, False)
        return
    # In whole vectors: a rest in every part would be slow.
    var splits = max(1, ceildiv(inner, BLOCK_COLUMNS))
    var part = align_up(ceildiv(inner, splits), LANES)
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
    var apart = (last - first) // STREAMS
    for column in range(first, first + apart):
        var part = u.part(column)
        tile[1, STREAMS, True](
            y.part(0, column), x, w.part(column), inner, low, part, rank, False, apart
        )
    for column in range(first + STREAMS * apart, last):
        var part = u.part(column)
        tile[1, 1, True](
            y.part(0, column), x, w.part(column), inner, low, part, rank, False, 1
        )


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
    var apart = (last - first) // TILE_OUTS
    for column in range(first, first + apart):
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
            apart,
        )
    for column in range(first + TILE_OUTS * apart, last):
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
            1,
        )


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
    apart: Int,
):
    """Write `outs` columns of y, `apart` from each other, in as few and as even tiles as
    the rows allow."""
    var row = 0
    while row < rows:
        var left = rows - row
        var part = y.part(row)
        var terms = low.part(row)
        # Only the first tile finds the weights in memory, if not in a cache.
        if left >= 6 and left != 8:
            tile[6, outs, True](
                part, x.part(row), w, inner, terms, u, rank, adds, apart
            )
            row += 6
        elif left >= 4:
            tile[4, outs, True](
                part, x.part(row), w, inner, terms, u, rank, adds, apart
            )
            row += 4
        elif left >= 2:
            tile[2, outs, True](
                part, x.part(row), w, inner, terms, u, rank, adds, apart
            )
            row += 2
        else:
            tile[1, outs, False](
                part, x.part(row), w, inner, terms, u, rank, adds, apart
            )
            row += 1
