"""Products on a GPU: tiles in shared memory for many rows, a warp a column for few."""

from max.gpu import WARP_SIZE, block_idx, lane_id, thread_idx, warp_id
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp
from max.gpu.sync import barrier
from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import size_of

from .matrix import Matrix

comptime FEW_ROWS = 8
"""Up to so many rows of x a product is bound by reading the weights."""

comptime WARPS = 8
"""Warps of a block, each with columns of y of its own."""

comptime VECTOR = 8
"""Weights that a lane loads at once: 16 bytes of bfloat16."""

comptime TILE = 64
"""Rows and columns of y that a block computes when there are many rows."""

comptime DEPTH = 32
"""Columns of x and w that are in shared memory at a time: a warp reads a row of them,
neighbouring addresses by neighbouring lanes."""

comptime EACH = 4
"""Rows and columns of y that a thread computes."""

comptime SIDE = TILE // EACH
comptime THREADS = SIDE * SIDE
comptime PITCH = DEPTH + 1
"""One more than the depth, so that lanes that read a column meet different banks."""


def multiply[
    x_dtype: DType, w_dtype: DType, y_dtype: DType, scaled: Bool
](
    y: Matrix[y_dtype],
    x: Matrix[x_dtype],
    w: Matrix[w_dtype],
    inner: Int,
    low: Matrix[DType.float32],
    u: Matrix[w_dtype],
    rank: Int,
    scale: Matrix[w_dtype],
    rows: Int,
    columns: Int,
    ctx: DeviceContext,
) raises:
    """Enqueue ``y = (x·wᵀ + low·uᵀ) · scale``, summed in float32.

    Parameters:
        x_dtype: Dtype of x.
        w_dtype: Dtype of w, u and `scale`.
        y_dtype: Dtype of y.
        scaled: Whether `scale` is looked at.

    Args:
        y: ``[rows, columns]``.
        x: ``[rows, inner]``.
        w: ``[columns, inner]``.
        inner: Columns of x and w.
        low: ``[rows, rank]``.
        u: ``[columns, rank]``.
        rank: Columns of `low` and u; with 0 there is no second product.
        scale: ``[1, columns]``.
        rows: Rows of x and y.
        columns: Rows of w, columns of y.
        ctx: The device.
    """
    if rows == 0 or columns == 0:
        return
    if rows <= FEW_ROWS:
        comptime kernel = few_rows[x_dtype, w_dtype, y_dtype, scaled]
        ctx.enqueue_function[kernel](
            y.start,
            Int64(y.stride),
            x.start,
            w.start,
            Int64(inner),
            low.start,
            Int64(low.stride),
            u.start,
            Int64(rank),
            scale.start,
            Int64(rows),
            Int64(columns),
            grid_dim=ceildiv(columns, WARPS),
            block_dim=WARPS * WARP_SIZE,
        )
    else:
        comptime kernel = many_rows[x_dtype, w_dtype, y_dtype, scaled]
        ctx.enqueue_function[kernel](
            y.start,
            Int64(y.stride),
            x.start,
            w.start,
            Int64(inner),
            low.start,
            Int64(low.stride),
            u.start,
            Int64(rank),
            scale.start,
            Int64(rows),
            Int64(columns),
            grid_dim=(ceildiv(columns, TILE), ceildiv(rows, TILE)),
            block_dim=THREADS,
        )


def few_rows[
    x_dtype: DType, w_dtype: DType, y_dtype: DType, scaled: Bool
](
    y: Matrix[y_dtype].Start,
    y_stride: Int64,
    x: Matrix[x_dtype].Start,
    w: Matrix[w_dtype].Start,
    inner_size: Int64,
    low: Matrix[DType.float32].Start,
    low_stride: Int64,
    u: Matrix[w_dtype].Start,
    rank_size: Int64,
    scale: Matrix[w_dtype].Start,
    row_count: Int64,
    column_count: Int64,
):
    """Each warp reads one row of w once, coalesced, for all rows of x."""
    var inner = Int(inner_size)
    var rank = Int(rank_size)
    var rows = Int(row_count)
    var column = Int(block_idx.x) * WARPS + Int(warp_id())
    if column >= Int(column_count):
        return
    var lane = Int(lane_id())
    var sums = Array[Float32, FEW_ROWS](fill=0)
    _add_row(sums, Matrix(x, inner), Matrix(w, inner).part(column), inner, rows, lane)
    _add_row(
        sums,
        Matrix(low, Int(low_stride)),
        Matrix(u, rank).part(column),
        rank,
        rows,
        lane,
    )
    comptime for r in range(FEW_ROWS):
        var total = warp.sum(sums[r])
        if r < rows and lane == 0:
            comptime if scaled:
                total *= scale[unsafe_offset=column].cast[DType.float32]()
            Matrix(y, Int(y_stride)).store(r, column, total.cast[y_dtype]())


@always_inline
def _add_row[
    x_dtype: DType, w_dtype: DType
](
    mut sums: Array[Float32, FEW_ROWS],
    x: Matrix[x_dtype],
    w: Matrix[w_dtype],
    inner: Int,
    rows: Int,
    lane: Int,
):
    comptime x_bytes = VECTOR * size_of[x_dtype]()
    comptime w_bytes = VECTOR * size_of[w_dtype]()
    # Vectors are loaded where all of them are aligned, rows of an odd width one by one.
    var is_aligned = (
        inner % VECTOR == 0
        and x.stride % VECTOR == 0
        and Int(x.start) % x_bytes == 0
        and Int(w.start) % w_bytes == 0
    )
    var whole = inner if is_aligned else 0
    for k in range(lane * VECTOR, whole, WARP_SIZE * VECTOR):
        var weights = w.load[VECTOR, w_bytes](0, k)
        comptime for r in range(FEW_ROWS):
            if r < rows:
                sums[r] += (x.load[VECTOR, x_bytes](r, k) * weights).reduce_add()
    for k in range(whole + lane, inner, WARP_SIZE):
        var weight = w.load[1](0, k)
        comptime for r in range(FEW_ROWS):
            if r < rows:
                sums[r] += (x.load[1](r, k) * weight)[0]


def many_rows[
    x_dtype: DType, w_dtype: DType, y_dtype: DType, scaled: Bool
](
    y: Matrix[y_dtype].Start,
    y_stride: Int64,
    x: Matrix[x_dtype].Start,
    w: Matrix[w_dtype].Start,
    inner_size: Int64,
    low: Matrix[DType.float32].Start,
    low_stride: Int64,
    u: Matrix[w_dtype].Start,
    rank_size: Int64,
    scale: Matrix[w_dtype].Start,
    row_count: Int64,
    column_count: Int64,
):
    """Each block computes a tile of y; tiles of x and w go through shared memory."""
    var inner = Int(inner_size)
    var rank = Int(rank_size)
    var rows = Int(row_count)
    var columns = Int(column_count)
    var first_row = Int(block_idx.y) * TILE
    var first_column = Int(block_idx.x) * TILE
    var sums = Array[Float32, EACH * EACH](fill=0)
    _add_tiles(
        sums,
        Matrix(x, inner).part(first_row),
        Matrix(w, inner).part(first_column),
        inner,
        rows - first_row,
        columns - first_column,
    )
    _add_tiles(
        sums,
        Matrix(low, Int(low_stride)).part(first_row),
        Matrix(u, rank).part(first_column),
        rank,
        rows - first_row,
        columns - first_column,
    )
    var across = Int(thread_idx.x) % SIDE
    var down = Int(thread_idx.x) // SIDE
    comptime for i in range(EACH):
        comptime for j in range(EACH):
            var row = first_row + down + i * SIDE
            var column = first_column + across + j * SIDE
            if row < rows and column < columns:
                var total = sums[i * EACH + j]
                comptime if scaled:
                    total *= scale[unsafe_offset=column].cast[DType.float32]()
                Matrix(y, Int(y_stride)).store(row, column, total.cast[y_dtype]())


@always_inline
def _add_tiles[
    x_dtype: DType, w_dtype: DType
](
    mut sums: Array[Float32, EACH * EACH],
    x: Matrix[x_dtype],
    w: Matrix[w_dtype],
    inner: Int,
    rows: Int,
    columns: Int,
):
    var x_tile = unsafe_stack_allocation[
        TILE * PITCH, Float32, address_space=AddressSpace.SHARED
    ]()
    var w_tile = unsafe_stack_allocation[
        TILE * PITCH, Float32, address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var across = thread % SIDE
    var down = thread // SIDE
    for begin in range(0, inner, DEPTH):
        comptime for i in range(TILE * DEPTH // THREADS):
            var row, depth = divmod(thread + i * THREADS, DEPTH)
            var inside = begin + depth < inner
            var at = row * PITCH + depth
            x_tile[unsafe_offset=at] = (
                x.load[1](row, begin + depth)[0] if inside
                and row < rows else Float32(0)
            )
            w_tile[unsafe_offset=at] = (
                w.load[1](row, begin + depth)[0] if inside
                and row < columns else Float32(0)
            )
        barrier()
        for depth in range(DEPTH):
            var weights = Array[Float32, EACH](fill=0)
            comptime for j in range(EACH):
                weights[j] = w_tile[unsafe_offset=(across + j * SIDE) * PITCH + depth]
            comptime for i in range(EACH):
                var value = x_tile[unsafe_offset=(down + i * SIDE) * PITCH + depth]
                comptime for j in range(EACH):
                    sums[i * EACH + j] += value * weights[j]
        barrier()
