"""The matrix unit for few rows of x and weights in bfloat16: bound by reading them.

Weights go from memory to the unit as they are. A tile of x meets four tiles of weights,
so that it is loaded once for 4 KiB of them, and stays in the first-level cache.
"""

from std.math import ceildiv
from std.memory import bitcast

from .amx import SIDE, WordsAt, load, multiply, store, zero
from .matrix import INTO_SECOND_CACHE, Matrix
from .pieces import (
    DEPTH,
    FEW_TILES,
    Panel,
    Strips,
    TILE_WORDS,
    Words,
    aligned,
    blocks_of,
    load_row,
    transpose,
    write,
)
from .tile import LINE_BYTES

comptime HEIGHT = FEW_TILES * SIDE
"""Rows of weights that are worked on at a time."""

comptime ASKED_BYTES = 1 << 18
"""The largest panel that is asked for ahead, measured: what is asked for, what is worked
on and x in pieces share the second-level cache."""

comptime LINE_WORDS = LINE_BYTES // 4
comptime Weights = Matrix[DType.bfloat16]
comptime Values = SIMD[DType.float32, SIDE]


def multiply_few(
    y: Matrix[DType.float32],
    x: Strips,
    w: Weights,
    inner: Int,
    low: Strips,
    u: Weights,
    rank: Int,
    first_row: Int,
    rows: Int,
    first: Int,
    last: Int,
    scratch: WordsAt,
):
    """Do what `multiply_columns` does, for up to 16 rows.

    Args:
        y: ``[rows, out]``.
        x: ``[rows, inner]``.
        w: ``[out, inner]``.
        inner: Columns of x and w.
        low: ``[rows, rank]``.
        u: ``[out, rank]``.
        rank: Columns of `low` and u; with 0 there is no second product.
        first_row: The first row of x, a multiple of 16.
        rows: How many.
        first: The first row of w to work on.
        last: The row of w to stop before; with none, there is nothing to do.
        scratch: `scratch_words` of this thread's own, from a whole cache line.
    """
    if first >= last:
        return
    # A panel asks for the next; nobody has asked for the first, and what follows the
    # last is another thread's.
    var apart = (last - first) // HEIGHT * SIDE
    if apart > 0:
        if _asks(inner):
            _ask_for(w.part(first), inner, apart)
        _ask_for(u.part(first), rank, apart)
    if x.tiles() == 2:
        _multiply_panels[2](
            y, x, w, inner, low, u, rank, first_row, rows, first, last, scratch
        )
    else:
        _multiply_panels[3](
            y, x, w, inner, low, u, rank, first_row, rows, first, last, scratch
        )


def _multiply_panels[
    x_tiles: Int
](
    y: Matrix[DType.float32],
    x: Strips,
    w: Weights,
    inner: Int,
    low: Strips,
    u: Weights,
    rank: Int,
    first_row: Int,
    rows: Int,
    first: Int,
    last: Int,
    scratch: WordsAt,
):
    var blocks = blocks_of(inner)
    var rest = scratch.unsafe_offset(blocks * FEW_TILES * TILE_WORDS)
    var memory = Array[UInt32, TILE_WORDS + SIDE](fill=0)
    var sums = aligned(memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]())
    var whole = (last - first) // HEIGHT
    for index in range(ceildiv(last - first, HEIGHT)):
        # The tiles of a panel are far apart, each in a part of its own: four places
        # are read from faster than one. What fills no panel comes at the end.
        var is_whole = index < whole
        var column = first + index * (SIDE if is_whole else HEIGHT)
        var apart = whole * SIDE if is_whole else SIDE
        var columns = HEIGHT if is_whole else last - column
        comptime for t in range(FEW_TILES):
            zero[t]()
        var panel = _prepare(w.part(column), columns, inner, apart, scratch)
        var at = x.strip(first_row // SIDE, 0)
        if index + 1 < whole:
            _ask_for(u.part(column + SIDE), rank, apart)
        if index + 1 < whole and _asks(inner):
            _accumulate[x_tiles, True](panel, at, blocks)
        else:
            _accumulate[x_tiles, False](panel, at, blocks)
        if rank > 0:
            panel = _prepare(u.part(column), columns, rank, apart, rest)
            at = low.strip(first_row // SIDE, 0)
            _accumulate[x_tiles, False](panel, at, blocks_of(rank))
        comptime for t in range(FEW_TILES):
            if columns > t * SIDE:
                store[t](sums)
                _finish[x_tiles](
                    y.part(first_row, column + t * apart),
                    sums,
                    x.width,
                    rows,
                    columns - t * SIDE,
                )
    _ = memory


@always_inline
def _asks(inner: Int) -> Bool:
    """Return whether panels of so many columns are asked for ahead."""
    return 2 * inner * HEIGHT <= ASKED_BYTES


@always_inline
def _ask_for(w: Weights, columns: Int, apart: Int):
    """Ask for a panel, whose tiles are `apart` rows from each other."""
    for line in range(2 * columns * SIDE // LINE_BYTES):
        comptime for t in range(FEW_TILES):
            w.prefetch[INTO_SECOND_CACHE](t * apart, line * DEPTH)


def _prepare(
    w: Weights, rows: Int, columns: Int, apart: Int, scratch: WordsAt
) -> Panel:
    """Return the tiles of up to 64 rows, each `apart` rows from the last: where they
    are, if they can be used from there, or in the scratch, with zeros where there is
    nothing."""
    if rows >= HEIGHT and columns % DEPTH == 0:
        var words = w.start.unsafe_bitcast[UInt32]()
        return Panel(words, 2 * w.stride, apart * w.stride // 2, 0, SIDE)
    for block in range(blocks_of(columns)):
        var column = block * DEPTH
        var to = scratch.unsafe_offset(block * FEW_TILES * TILE_WORDS)
        for row in range(HEIGHT):
            var words = Words(0)
            if row < rows:
                var at = row // SIDE * apart + row % SIDE
                words = bitcast[DType.uint32, SIDE](
                    load_row(w, at, column, columns - column)
                )
            write(to.unsafe_offset(row * SIDE), words)
    return Panel(scratch, 4 * SIDE, TILE_WORDS, 0, FEW_TILES * TILE_WORDS)


@always_inline
def _accumulate[
    x_tiles: Int, streams: Bool
](panel: Panel, x: WordsAt, blocks: Int):
    """Add the products of a panel and one strip to the sums in the unit."""
    comptime products = x_tiles * FEW_TILES
    var w = panel.start
    var at = x
    # The next panel follows this one, tile by tile.
    var ahead = panel.start.unsafe_offset(SIDE * panel.row_bytes // 4)
    for _ in range(blocks):
        # Small pieces first, which is more exact.
        comptime for i in range(x_tiles):
            comptime x_tile = x_tiles - 1 - i
            comptime right = 6 + i % 2
            load[right](at.unsafe_offset(x_tile * TILE_WORDS), 4 * SIDE)
            comptime for t in range(FEW_TILES):
                comptime left = 4 + t % 2
                load[left](w.unsafe_offset(t * panel.tile_words), panel.row_bytes)
                multiply[t, left, right]()
                comptime if streams:
                    # Evenly: many at once would keep the tiles' own loads waiting.
                    comptime step = i * FEW_TILES + t
                    comptime for line in range(
                        HEIGHT * step // products, HEIGHT * (step + 1) // products
                    ):
                        Matrix(
                            of=ahead, stride=panel.tile_words
                        ).prefetch[INTO_SECOND_CACHE](
                            line % FEW_TILES, line // FEW_TILES * LINE_WORDS
                        )
        comptime if streams:
            ahead = ahead.unsafe_offset(SIDE * LINE_WORDS)
        w = w.unsafe_offset(panel.block_words)
        at = at.unsafe_offset(x_tiles * TILE_WORDS)


@always_inline
def _finish[
    x_tiles: Int
](y: Matrix[DType.float32], sums: WordsAt, width: Int, rows: Int, columns: Int):
    """Write up to 16 columns of y from a tile of sums, which has a column for each row
    of x, or for each piece of one."""
    var words = Array[Words, SIDE](fill=Words(0))
    comptime for r in range(SIDE):
        words[r] = sums.unsafe_load[width=SIDE, alignment=LINE_BYTES](r * SIDE)
    transpose(words)
    for r in range(rows):
        var values = bitcast[DType.float32, SIDE](words[r])
        comptime if x_tiles == 2:
            # The third piece went to the sums of the first.
            values += bitcast[DType.float32, SIDE](words[r + width])
        if columns >= SIDE:
            y.start.unsafe_store[alignment=4](r * y.stride, values)
        else:
            for c in range(columns):
                y.store(r, c, values[c])
