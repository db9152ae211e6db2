"""Products on a CPU with a matrix unit: float32 by way of bfloat16, without a loss.

A float32 is the sum of three bfloat16, exactly: 24 bits in pieces of 8. The unit
multiplies bfloat16 exactly and adds in float32, so the products of pieces add up to what
float32 gives. There are three for weights in bfloat16 and six for weights in float32,
each far faster than the one that it takes part in.

Rows of weights are what the unit calls its left operand, as they lie in memory; x, its
right operand, is rearranged once for all weights. The unit takes numbers below 2⁻¹²⁶ for
0; a row of x with a NaN, an infinity, or what rounds to one in bfloat16 gives NaN.
"""

from std.math import align_up, ceildiv, iota
from std.memory import bitcast
from std.sys import size_of
from std.sys.intrinsics import masked_load

from .amx import SIDE, WordsAt, load, multiply, store, zero
from .matrix import INTO_SECOND_CACHE, Matrix

comptime DEPTH = 32
"""Columns of bfloat16 of a tile, which is 1 KiB."""

comptime PANEL = 2 * SIDE
"""Rows of weights that are worked on at a time: two tiles, each against two of x. Four
sums fill half of the unit's eight tiles, and need the fewest loads."""

comptime FEW_TILES = 4
"""The same with few rows of x, all of them in one tile: four sums; two tiles of the unit
are for weights in turn, and two for x."""

comptime PIECES = 3
comptime TILE_WORDS = SIDE * SIDE

comptime PART = 768
"""Columns that are worked on at a time, so that a panel in pieces and a block of x fit
the second-level cache."""

comptime BLOCK_BYTES = 1 << 20
"""Of x in pieces, which the second-level cache holds while weights pass by."""

comptime UNIT_ROWS[dtype: DType] = 8 if dtype == DType.bfloat16 else 25
"""From so many rows of x on the unit is faster than vectors; measured."""

comptime Words = SIMD[DType.uint32, SIDE]
comptime Values = SIMD[DType.float32, SIDE]


struct Strips(ImplicitlyCopyable, RegisterPassable):
    """Rows of x in pieces, 16 to a strip, as the unit reads its right operand."""

    var start: WordsAt
    """The first tile."""

    var blocks: Int
    """Blocks of 32 columns of a strip."""

    var width: Int
    """Columns of a tile that a piece takes: as many as a strip has rows, at least."""

    def __init__(out self, start: WordsAt, blocks: Int, width: Int):
        self.start = start
        self.blocks = blocks
        self.width = width

    @always_inline
    def tiles(self) -> Int:
        """Return how many tiles the pieces of a block take."""
        return ceildiv(PIECES, SIDE // self.width)

    @always_inline
    def strip(self, index: Int, block: Int) -> WordsAt:
        """Return where the tiles of a block begin, piece after piece."""
        return self.start.unsafe_offset(
            (index * self.blocks + block) * self.tiles() * TILE_WORDS
        )


struct Panel(ImplicitlyCopyable, RegisterPassable):
    """Where the tiles of a panel of weights are: in the weights, or in a scratch."""

    var start: WordsAt
    """The first tile."""

    var row_bytes: Int
    """From one row of a tile to the next."""

    var tile_words: Int
    """From the first 16 rows to the others."""

    var piece_words: Int
    """From one piece to the next."""

    var block_words: Int
    """From one block of 32 columns to the next."""

    def __init__(
        out self,
        start: WordsAt,
        row_bytes: Int,
        tile_words: Int,
        piece_words: Int,
        block_words: Int,
    ):
        self.start = start
        self.row_bytes = row_bytes
        self.tile_words = tile_words
        self.piece_words = piece_words
        self.block_words = block_words


def blocks_of(columns: Int) -> Int:
    """Return how many tiles lie side by side, the last perhaps with zeros."""
    return ceildiv(columns, DEPTH)


def pieces_of[dtype: DType]() -> Int:
    """Return how many pieces a weight has."""
    return 1 if dtype == DType.bfloat16 else PIECES


def piece_width[dtype: DType](rows: Int) -> Int:
    """Return how many columns of a tile a piece of x takes.

    A product of tiles takes as long whether they are full or not, so that pieces of few
    rows share a tile. With weights in float32 so few rows are left to vectors.
    """
    comptime if dtype == DType.bfloat16:
        if rows <= SIDE // 2:
            return SIDE // 2
    return SIDE


def strips_words(strips: Int, columns: Int) -> Int:
    """Return the most that some strips take."""
    return strips * blocks_of(columns) * PIECES * TILE_WORDS


def scratch_words[dtype: DType](inner: Int, rank: Int) -> Int:
    """Return how much a thread needs to work on a panel."""
    comptime if dtype == DType.bfloat16:
        # With few rows of x a panel has the most.
        return (blocks_of(inner) + blocks_of(rank)) * FEW_TILES * TILE_WORDS + SIDE
    var blocks = blocks_of(min(inner, PART)) + blocks_of(rank)
    return blocks * PIECES * 2 * TILE_WORDS + SIDE


def aligned(start: WordsAt) -> WordsAt:
    """Return the first whole cache line."""
    return start.unsafe_offset((64 - Int(start) % 64) % 64 // 4)


@always_inline
def _pair(first: Words, second: Words) -> Words:
    """Return the upper halves of two vectors, the first's in the lower halves."""
    return (first >> 16) | (second & 0xFFFF0000)


@always_inline
def _split(mut first: Values, mut second: Values) -> Words:
    """Take the leading piece off both vectors, rounded, and return it in pairs."""
    var a = bitcast[DType.uint32, SIDE](first) + 0x8000
    var b = bitcast[DType.uint32, SIDE](second) + 0x8000
    first -= bitcast[DType.float32, SIDE](a & 0xFFFF0000)
    second -= bitcast[DType.float32, SIDE](b & 0xFFFF0000)
    return _pair(a, b)


@always_inline
def _rest(first: Values, second: Values) -> Words:
    """Return the last piece of both vectors, in pairs: it is all there is, or NaN."""
    return _pair(
        bitcast[DType.uint32, SIDE](first), bitcast[DType.uint32, SIDE](second)
    )


@always_inline
def load_row[
    dtype: DType
](source: Matrix[dtype], row: Int, column: Int, width: Int) -> SIMD[dtype, DEPTH]:
    """Load up to 32 neighbours, with zeros after."""
    var start = source.start.unsafe_offset(row * source.stride + column)
    if width >= DEPTH:
        return start.unsafe_load[width=DEPTH, alignment=size_of[Scalar[dtype]]()](0)
    var inside = iota[DType.int32, DEPTH]().lt(Int32(width))
    return masked_load[DEPTH](start, inside, SIMD[dtype, DEPTH](0))


@always_inline
def transpose(mut values: Array[Words, SIDE]):
    """Turn a tile's rows into its columns."""
    # To interleave the halves of a list rotates the bits of an element's place by one.
    comptime for _ in range(4):
        var turned = Array[Words, SIDE](fill=Words(0))
        comptime for i in range(SIDE // 2):
            var both = values[i].interleave(values[i + SIDE // 2])
            turned[2 * i] = both.slice[SIDE, offset=0]()
            turned[2 * i + 1] = both.slice[SIDE, offset=SIDE]()
        values = turned^


@always_inline
def write(start: WordsAt, words: Words):
    """Write a whole cache line."""
    start.unsafe_store[alignment=64](0, words)


def pack_strip[
    natural: Bool
](
    strips: Strips, index: Int, x: Matrix[DType.float32], rows: Int, columns: Int
):
    """Split up to 16 rows of x into pieces.

    Parameters:
        natural: Whether pairs are neighbours, as in weights that are read where they
            are, or 16 apart, which costs less.
    """
    var pieces = Array[Words, PIECES * SIDE](fill=Words(0))
    var together = SIDE // strips.width
    for block in range(strips.blocks):
        var column = block * DEPTH
        for row in range(rows):
            var values = load_row(x, row, column, columns - column)
            var first: Values
            var second: Values
            comptime if natural:
                first, second = values.deinterleave()
            else:
                first = values.slice[SIDE, offset=0]()
                second = values.slice[SIDE, offset=SIDE]()
            comptime for p in range(PIECES):
                var tile, place = divmod(p, together)
                var at = tile * SIDE + place * strips.width + row
                comptime if p < PIECES - 1:
                    pieces[at] = _split(first, second)
                else:
                    pieces[at] = _rest(first, second)
        var to = strips.strip(index, block)
        for t in range(strips.tiles()):
            var tile = Array[Words, SIDE](fill=Words(0))
            comptime for r in range(SIDE):
                tile[r] = pieces[t * SIDE + r]
            transpose(tile)
            comptime for r in range(SIDE):
                write(to.unsafe_offset((t * SIDE + r) * SIDE), tile[r])


def prepare[
    dtype: DType
](w: Matrix[dtype], rows: Int, columns: Int, scratch: WordsAt) -> Panel:
    """Return the tiles of up to 32 rows of weights: where they are, if they can be used
    from there, or in the scratch."""
    comptime pieces = pieces_of[dtype]()
    comptime if dtype == DType.bfloat16:
        if rows >= PANEL and columns % DEPTH == 0:
            var words = w.start.unsafe_bitcast[UInt32]()
            return Panel(words, 2 * w.stride, SIDE * w.stride // 2, 0, SIDE)
    comptime block_words = pieces * 2 * TILE_WORDS
    for block in range(blocks_of(columns)):
        _cut_block(
            w, rows, columns, block, scratch.unsafe_offset(block * block_words)
        )
    return Panel(scratch, 4 * SIDE, TILE_WORDS, 2 * TILE_WORDS, block_words)


@always_inline
def _cut_block[
    dtype: DType
](w: Matrix[dtype], rows: Int, columns: Int, block: Int, to: WordsAt):
    """Write the tiles of 32 columns of a panel, with zeros where there is nothing."""
    var column = block * DEPTH
    for row in range(rows):
        comptime if dtype != DType.bfloat16:
            _ask_ahead(w, row, block, columns == w.stride)
        _cut(
            load_row(w, row, column, columns - column),
            to.unsafe_offset(row * SIDE),
        )
    for row in range(rows, PANEL):
        _cut(SIMD[dtype, DEPTH](0), to.unsafe_offset(row * SIDE))


@always_inline
def _ask_ahead[dtype: DType](w: Matrix[dtype], row: Int, block: Int, whole: Bool):
    """Ask for a share of the next panel; in order, if its rows are whole."""
    comptime line = 64 // size_of[Scalar[dtype]]()
    var at = (
        PANEL * w.stride + (block * PANEL + row) * DEPTH if whole else (PANEL + row)
        * w.stride
        + block * DEPTH
    )
    comptime for i in range(DEPTH // line):
        w.prefetch[INTO_SECOND_CACHE](0, at + i * line)


@always_inline
def _cut[dtype: DType](values: SIMD[dtype, DEPTH], to: WordsAt):
    """Write a row of tiles: its weights as they are, or in pieces."""
    comptime if dtype == DType.bfloat16:
        write(to, bitcast[DType.uint32, SIDE](values))
    else:
        var wide = rebind[SIMD[DType.float32, DEPTH]](values)
        var first = wide.slice[SIDE, offset=0]()
        var second = wide.slice[SIDE, offset=SIDE]()
        comptime for p in range(PIECES - 1):
            write(to.unsafe_offset(p * 2 * TILE_WORDS), _split(first, second))
        write(to.unsafe_offset((PIECES - 1) * 2 * TILE_WORDS), _rest(first, second))


@always_inline
def _accumulate[
    strips: Int, pieces: Int, streams: Bool
](panel: Panel, x: WordsAt, next_strip: Int, blocks: Int):
    """Add the products of a panel and one or two strips to the sums in the unit."""
    var w = panel.start
    var at = x
    var ahead = panel.start.unsafe_offset(2 * panel.tile_words)
    for _ in range(blocks):
        # Small ones first, which is more exact. Two products are left out: they are
        # less than 2⁻²³ of the whole, two roundings of float32.
        comptime for i in range(pieces):
            comptime wp = pieces - 1 - i
            var left = w.unsafe_offset(wp * panel.piece_words)
            load[4](left, panel.row_bytes)
            load[5](left.unsafe_offset(panel.tile_words), panel.row_bytes)
            comptime for j in range(PIECES - wp):
                comptime xp = PIECES - 1 - wp - j
                var right = at.unsafe_offset(xp * TILE_WORDS)
                load[6](right, 4 * SIDE)
                multiply[0, 4, 6]()
                multiply[1, 5, 6]()
                comptime if strips == 2:
                    load[7](right.unsafe_offset(next_strip), 4 * SIDE)
                    multiply[2, 4, 7]()
                    multiply[3, 5, 7]()
                comptime if streams:
                    comptime for line in range(
                        PANEL * xp // PIECES, PANEL * (xp + 1) // PIECES
                    ):
                        Matrix(of=ahead, stride=0).prefetch[INTO_SECOND_CACHE](
                            0, line * SIDE
                        )
        comptime if streams:
            ahead = ahead.unsafe_offset(PANEL * SIDE)
        w = w.unsafe_offset(panel.block_words)
        at = at.unsafe_offset(PIECES * TILE_WORDS)


@always_inline
def _finish[
    tile: Int
](y: Matrix[DType.float32], rows: Int, columns: Int, adds: Bool, scratch: WordsAt):
    """Write a tile of sums, which has y's columns as rows."""
    store[tile](scratch)
    var values = Array[Words, SIDE](fill=Words(0))
    comptime for r in range(SIDE):
        values[r] = scratch.unsafe_load[width=SIDE, alignment=64](r * SIDE)
    transpose(values)
    comptime for r in range(SIDE):
        if r < rows:
            var sums = bitcast[DType.float32, SIDE](values[r])
            if columns >= SIDE:
                var to = y.start.unsafe_offset(r * y.stride)
                if adds:
                    sums += to.unsafe_load[width=SIDE, alignment=4](0)
                to.unsafe_store[alignment=4](0, sums)
            else:
                for c in range(columns):
                    y.store(r, c, sums[c] + (y.load[1](r, c)[0] if adds else 0))


@always_inline
def _multiply_pair[
    strips: Int, dtype: DType, cuts: Bool
](
    y: Matrix[DType.float32],
    x: Strips,
    low: Strips,
    index: Int,
    first_block: Int,
    blocks: Int,
    w: Matrix[dtype],
    width: Int,
    panel: Panel,
    u: Panel,
    low_blocks: Int,
    rows: Int,
    columns: Int,
    streams: Bool,
):
    """Write up to 32 rows and 32 columns of y."""
    comptime pieces = pieces_of[dtype]()
    zero[0]()
    zero[1]()
    comptime if strips == 2:
        zero[2]()
        zero[3]()
    var at = x.strip(index, first_block)
    var next_strip = x.blocks * PIECES * TILE_WORDS
    comptime if cuts:
        for block in range(blocks):
            _cut_block(w, columns, width, block, panel.start)
            var part = at.unsafe_offset(block * PIECES * TILE_WORDS)
            _accumulate[strips, pieces, False](panel, part, next_strip, 1)
    else:
        if streams:
            _accumulate[strips, pieces, True](panel, at, next_strip, blocks)
        else:
            _accumulate[strips, pieces, False](panel, at, next_strip, blocks)
    _accumulate[strips, pieces, False](
        u, low.strip(index, 0), low.blocks * PIECES * TILE_WORDS, low_blocks
    )
    var adds = first_block > 0
    var memory = Array[UInt32, TILE_WORDS + SIDE](fill=0)
    var scratch = aligned(memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]())
    _finish[0](y, rows, columns, adds, scratch)
    if columns > SIDE:
        _finish[1](y.part(0, SIDE), rows, columns - SIDE, adds, scratch)
    comptime if strips == 2:
        _finish[2](y.part(SIDE), rows - SIDE, columns, adds, scratch)
        if columns > SIDE:
            _finish[3](y.part(SIDE, SIDE), rows - SIDE, columns - SIDE, adds, scratch)
    _ = memory


def multiply_many[
    dtype: DType
](
    y: Matrix[DType.float32],
    x: Strips,
    w: Matrix[dtype],
    inner: Int,
    low: Strips,
    u: Matrix[dtype],
    rank: Int,
    first_row: Int,
    last_row: Int,
    first: Int,
    last: Int,
    scratch: WordsAt,
):
    """Do what `multiply_columns` does, for any number of rows."""
    var splits = ceildiv(inner, PART)
    var part = align_up(ceildiv(inner, max(1, splits)), DEPTH)
    var block_rows = max(
        PANEL, BLOCK_BYTES // (2 * PIECES * max(1, part)) // PANEL * PANEL
    )
    for k in range(0, max(1, inner), max(1, part)):
        var width = min(part, inner - k)
        var blocks = blocks_of(width)
        var low_rank = rank if k + width >= inner else 0
        for begin in range(first_row, last_row, block_rows):
            var end = min(begin + block_rows, last_row)
            # Few rows meet each block at once, while it is in the first-level cache.
            var cuts = dtype == DType.float32 and end - begin <= PANEL
            for column in range(first, last, PANEL):
                var columns = min(PANEL, last - column)
                var part_w = w.part(column, k)
                var panel = Panel(
                    scratch,
                    4 * SIDE,
                    TILE_WORDS,
                    2 * TILE_WORDS,
                    pieces_of[dtype]() * 2 * TILE_WORDS,
                )
                if not cuts:
                    panel = prepare(part_w, columns, width, scratch)
                var u_panel = panel
                if low_rank > 0:
                    var rest = scratch.unsafe_offset(
                        blocks * pieces_of[dtype]() * 2 * TILE_WORDS
                    )
                    u_panel = prepare(u.part(column), columns, rank, rest)
                for row in range(begin, end, PANEL):

                    @always_inline
                    def multiply_rows[strips: Int, cuts: Bool]() {imm}:
                        _multiply_pair[strips, dtype, cuts](
                            y.part(row, column),
                            x,
                            low,
                            row // SIDE,
                            k // DEPTH,
                            blocks,
                            part_w,
                            width,
                            panel,
                            u_panel,
                            blocks_of(low_rank),
                            end - row,
                            columns,
                            # The first to read a panel asks for the next.
                            row == begin and width == w.stride,
                        )

                    if cuts and end - row > SIDE:
                        multiply_rows[2, True]()
                    elif cuts:
                        multiply_rows[1, True]()
                    elif end - row > SIDE:
                        multiply_rows[2, False]()
                    else:
                        multiply_rows[1, False]()
