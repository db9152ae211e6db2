"""The op `attnquant_generated_linear`: projections of one input, each a base and a
low-rank term, without building their effective weights."""

import extensibility
from extensibility import InputTensor, InputVariadicTensors, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.bit import pop_count
from std.math import ceildiv

from .amx import MAY_HAVE_UNIT, SIDE, configure, has_unit, release
from .cpu import (
    HostContext,
    few_shares,
    multiply_share,
    share_columns,
    task_count,
)
from .gpu import multiply
from .matrix import Matrix
from .pieces import (
    PANEL,
    UNIT_ROWS,
    Strips,
    aligned,
    blocks_of,
    pack_strip,
    piece_width,
    scratch_words,
    strips_words,
)
from .tile import TILE_OUTS
from .unit import multiply_columns


comptime SHARES = 8
"""Parts of the columns for each thread, where reading weights is not the limit."""


@extensibility.register("attnquant_generated_linear")
struct GeneratedLinear:
    """Computes ``y = [x·W0ᵀ + ((x·Vᵀ)·s)·Uᵀ]`` of all projections, side by side."""

    @staticmethod
    def execute[
        target: StaticString, projections: Int, factored: Int, matrix_unit: Bool
    ](
        y: OutputTensor[rank=2, ...],
        x: InputTensor[dtype=y.dtype, rank=2, ...],
        weights: InputVariadicTensors[rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        """Run the op.

        Parameters:
            target: ``cpu`` or ``gpu``.
            projections: How many there are.
            factored: Bit i is set if projection i has a low-rank term.
            matrix_unit: Whether a CPU may use its matrix unit, if it has one.

        Args:
            y: ``[rows, Σ out]``.
            x: ``[rows, in]``.
            weights: For each projection ``W0 [out, in]`` and, if it has a low-rank
                term, ``U [out, r]``, ``s [1, r]`` and ``V [r, in]``.
            ctx: Where to run.
        """
        comptime if target == "cpu":
            comptime assert y.dtype == DType.float32, "x: expected float32 on a CPU"
            run_on_cpu[projections, factored, matrix_unit](
                rebind[Matrix[DType.float32]](
                    Matrix(of=y.unsafe_ptr(), stride=y.dim_size(1))
                ),
                rebind[Matrix[DType.float32]](
                    Matrix(of=x.unsafe_ptr(), stride=x.dim_size(1))
                ),
                x.dim_size(0),
                x.dim_size(1),
                weights,
                ctx,
            )
        else:
            run_on_gpu[projections, factored](
                Matrix(of=y.unsafe_ptr(), stride=y.dim_size(1)),
                Matrix(of=x.unsafe_ptr(), stride=x.dim_size(1)),
                x.dim_size(0),
                x.dim_size(1),
                weights,
                ctx,
            )


def run_on_cpu[
    projections: Int, factored: Int, matrix_unit: Bool
](
    y: Matrix[DType.float32],
    x: Matrix[DType.float32],
    rows: Int,
    inner: Int,
    weights: InputVariadicTensors[rank=2, ...],
    ctx: DeviceContext,
) raises:
    """Compute all projections with what is fastest for so many rows."""
    var host = Pointer(to=ctx).unsafe_bitcast[HostContext]()[]
    comptime if matrix_unit and MAY_HAVE_UNIT:
        if rows >= UNIT_ROWS[weights.dtype] and has_unit():
            run_on_unit[projections, factored](y, x, rows, inner, weights, host)
            return
    run_on_vectors[projections, factored](y, x, rows, inner, weights, host)


def run_on_vectors[
    projections: Int, factored: Int
](
    y: Matrix[DType.float32],
    x: Matrix[DType.float32],
    rows: Int,
    inner: Int,
    weights: InputVariadicTensors[rank=2, ...],
    host: HostContext,
) raises:
    """Compute all projections, the columns of each step spread over the threads."""
    var ranks = _total_rank[projections, factored](weights)
    # x·Vᵀ·s of all projections, side by side like y.
    var memory = List[Float32](unsafe_uninit_length=rows * ranks)
    var low = Matrix(of=memory.unsafe_ptr(), stride=ranks)

    comptime if factored != 0:
        var tasks = task_count(rows * ranks * inner, host)

        def reduce(task: Int) {imm}:
            var first = ranks * task // tasks
            var last = ranks * (task + 1) // tasks
            var begin = 0
            comptime for p in range(projections):
                comptime if _has_factors(factored, p):
                    comptime at = _first(factored, p)
                    var rank = weights[at + 3].dim_size(0)
                    var v = Matrix(of=weights[at + 3].unsafe_ptr(), stride=inner)
                    var s = Matrix(of=weights[at + 2].unsafe_ptr(), stride=rank)
                    var part = low.part(0, begin)
                    var lo = max(first - begin, 0)
                    var hi = min(last - begin, rank)
                    multiply_share(part, x, v, inner, part, v, 0, rows, lo, hi)
                    for row in range(rows):
                        for r in range(lo, hi):
                            part.store(row, r, part.load[1](row, r) * s.load[1](0, r))
                    begin += rank

        sync_parallelize(reduce, tasks, host)

    var columns = y.stride
    var tasks = task_count(rows * columns * (inner + ranks), host)

    def expand(_task: Int, first: Int, last: Int) {imm}:
        var begin = 0
        var low_begin = 0
        comptime for p in range(projections):
            comptime at = _first(factored, p)
            var width = weights[at].dim_size(0)
            var w = Matrix(of=weights[at].unsafe_ptr(), stride=inner)
            var part = y.part(0, begin)
            var lo = max(first - begin, 0)
            var hi = min(last - begin, width)
            comptime if _has_factors(factored, p):
                var rank = weights[at + 3].dim_size(0)
                var u = Matrix(of=weights[at + 1].unsafe_ptr(), stride=rank)
                var term = low.part(0, low_begin)
                multiply_share(part, x, w, inner, term, u, rank, rows, lo, hi)
                low_begin += rank
            else:
                multiply_share(part, x, w, inner, low, w, 0, rows, lo, hi)
            begin += width

    var shares = few_shares[weights.dtype](columns * inner, tasks)
    share_columns(expand, columns, TILE_OUTS, shares, tasks, host)
    # The tasks above see this memory through pointers only.
    _ = memory^


def run_on_unit[
    projections: Int, factored: Int
](
    y: Matrix[DType.float32],
    x: Matrix[DType.float32],
    rows: Int,
    inner: Int,
    weights: InputVariadicTensors[rank=2, ...],
    host: HostContext,
) raises:
    """Compute all projections with the matrix unit.

    First x in pieces and x·Vᵀ·s, the rows spread over the threads, then all columns.
    """
    comptime natural = weights.dtype == DType.bfloat16
    var strips = ceildiv(rows, SIDE)
    var ranks = _total_rank[projections, factored](weights)
    var low_memory = List[Float32](unsafe_uninit_length=rows * ranks)
    var low = Matrix(of=low_memory.unsafe_ptr(), stride=ranks)
    var columns = y.stride
    var tasks = task_count(rows * columns * (inner + ranks), host)
    var pack_tasks = min(strips, tasks)
    var scratch_size = scratch_words[weights.dtype](inner, ranks)
    var size = strips_words(strips, inner)
    comptime for p in range(projections):
        comptime if _has_factors(factored, p):
            size += strips_words(
                strips, weights[_first(factored, p) + 3].dim_size(0)
            )
    var memory = List[UInt32](unsafe_uninit_length=size + tasks * scratch_size + SIDE)
    var start = aligned(
        memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    )
    var piece = piece_width[weights.dtype](rows)
    var x_pieces = Strips(start, blocks_of(inner), piece)
    var low_start = start.unsafe_offset(strips_words(strips, inner))
    var scratch = start.unsafe_offset(size)

    def reduce(task: Int) {imm}:
        var first = strips * task // pack_tasks
        var last = strips * (task + 1) // pack_tasks
        for strip in range(first, last):
            var row = strip * SIDE
            pack_strip[natural](
                x_pieces, strip, x.part(row), min(SIDE, rows - row), inner
            )
        comptime if factored != 0:
            configure()
            var begin = 0
            var at_low = low_start
            comptime for p in range(projections):
                comptime if _has_factors(factored, p):
                    comptime at = _first(factored, p)
                    var rank = weights[at + 3].dim_size(0)
                    var v = Matrix(of=weights[at + 3].unsafe_ptr(), stride=inner)
                    var s = Matrix(of=weights[at + 2].unsafe_ptr(), stride=rank)
                    var part = low.part(0, begin)
                    var end = min(last * SIDE, rows)
                    multiply_columns(
                        part,
                        x_pieces,
                        v,
                        inner,
                        x_pieces,
                        v,
                        0,
                        first * SIDE,
                        end,
                        0,
                        rank,
                        scratch.unsafe_offset(task * scratch_size),
                    )
                    for row in range(first * SIDE, end):
                        for r in range(rank):
                            part.store(row, r, part.load[1](row, r) * s.load[1](0, r))
                    var pieces = Strips(at_low, blocks_of(rank), piece)
                    for strip in range(first, last):
                        var row = strip * SIDE
                        pack_strip[natural](
                            pieces, strip, part.part(row), min(SIDE, rows - row), rank
                        )
                    begin += rank
                    at_low = at_low.unsafe_offset(strips_words(strips, rank))
            release()

    sync_parallelize(reduce, pack_tasks, host)

    def expand(task: Int, first: Int, last: Int) {imm}:
        configure()
        var begin = 0
        var at_low = low_start
        comptime for p in range(projections):
            comptime at = _first(factored, p)
            var width = weights[at].dim_size(0)
            var w = Matrix(of=weights[at].unsafe_ptr(), stride=inner)
            var rank = 0
            var u = w
            var pieces = x_pieces
            comptime if _has_factors(factored, p):
                rank = weights[at + 3].dim_size(0)
                u = Matrix(of=weights[at + 1].unsafe_ptr(), stride=rank)
                pieces = Strips(at_low, blocks_of(rank), piece)
                at_low = at_low.unsafe_offset(strips_words(strips, rank))
            multiply_columns(
                y.part(0, begin),
                x_pieces,
                w,
                inner,
                pieces,
                u,
                rank,
                0,
                rows,
                max(first - begin, 0),
                min(last - begin, width),
                scratch.unsafe_offset(task * scratch_size),
            )
            begin += width
        release()

    var shares = SHARES
    if rows <= SIDE:
        shares = few_shares[weights.dtype](columns * inner, tasks)
    share_columns(expand, columns, 2 * PANEL, shares, tasks, host)
    # The tasks above see this memory through pointers only.
    _ = memory^
    _ = low_memory^


def run_on_gpu[
    dtype: DType, //, projections: Int, factored: Int
](
    y: Matrix[dtype],
    x: Matrix[dtype],
    rows: Int,
    inner: Int,
    weights: InputVariadicTensors[rank=2, ...],
    ctx: DeviceContext,
) raises:
    """Enqueue two products for each projection, or one without a low-rank term."""
    var ranks = _total_rank[projections, factored](weights)
    var memory = ctx.enqueue_create_buffer[DType.float32](max(1, rows * ranks))
    var low = Matrix(of=memory.unsafe_ptr(), stride=ranks)
    var begin = 0
    var low_begin = 0
    comptime for p in range(projections):
        comptime at = _first(factored, p)
        var width = weights[at].dim_size(0)
        var w = Matrix(of=weights[at].unsafe_ptr(), stride=inner)
        var part = y.part(0, begin)
        comptime if _has_factors(factored, p):
            var rank = weights[at + 3].dim_size(0)
            var u = Matrix(of=weights[at + 1].unsafe_ptr(), stride=rank)
            var s = Matrix(of=weights[at + 2].unsafe_ptr(), stride=rank)
            var v = Matrix(of=weights[at + 3].unsafe_ptr(), stride=inner)
            var term = low.part(0, low_begin)
            multiply[scaled=True](
                term, x, v, inner, low, v, 0, s, rows, rank, ctx
            )
            multiply[scaled=False](
                part, x, w, inner, term, u, rank, s, rows, width, ctx
            )
            low_begin += rank
        else:
            multiply[scaled=False](
                part, x, w, inner, low, w, 0, w, rows, width, ctx
            )
        begin += width
    # Freed in the stream's order, after the kernels that read it.
    _ = memory^


def _total_rank[
    projections: Int, factored: Int
](weights: InputVariadicTensors[rank=2, ...]) -> Int:
    var total = 0
    comptime for p in range(projections):
        comptime if _has_factors(factored, p):
            total += weights[_first(factored, p) + 3].dim_size(0)
    return total


def _has_factors(factored: Int, projection: Int) -> Bool:
    return (factored >> projection) & 1 == 1


def _first(factored: Int, projection: Int) -> Int:
    """Return where a projection's tensors begin."""
    var below = factored & ((1 << projection) - 1)
    return projection + 3 * Int(pop_count(below))
