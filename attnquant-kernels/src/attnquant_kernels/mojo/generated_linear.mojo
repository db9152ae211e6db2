"""The op `attnquant_generated_linear`: projections of one input, each a base and a
low-rank term, without building their effective weights."""

import extensibility
from extensibility import InputTensor, InputVariadicTensors, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.bit import pop_count

from .cpu import HostContext, multiply_share, task_count
from .gpu import multiply
from .matrix import Matrix


@extensibility.register("attnquant_generated_linear")
struct GeneratedLinear:
    """Computes ``y = [x·W0ᵀ + ((x·Vᵀ)·s)·Uᵀ]`` of all projections, side by side."""

    @staticmethod
    def execute[
        target: StaticString, projections: Int, factored: Int
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

        Args:
            y: ``[rows, Σ out]``.
            x: ``[rows, in]``.
            weights: For each projection ``W0 [out, in]`` and, if it has a low-rank
                term, ``U [out, r]``, ``s [1, r]`` and ``V [r, in]``.
            ctx: Where to run.
        """
        comptime if target == "cpu":
            comptime assert y.dtype == DType.float32, "x: expected float32 on a CPU"
            run_on_cpu[projections, factored](
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
    projections: Int, factored: Int
](
    y: Matrix[DType.float32],
    x: Matrix[DType.float32],
    rows: Int,
    inner: Int,
    weights: InputVariadicTensors[rank=2, ...],
    ctx: DeviceContext,
) raises:
    """Compute all projections, the columns of each step spread over the threads."""
    var host = Pointer(to=ctx).unsafe_bitcast[HostContext]()[]
    var ranks = _total_rank[projections, factored](weights)
    # x·Vᵀ·s of all projections, side by side like y.
    var memory = List[Float32](unsafe_uninit_length=rows * ranks)
    var low = Matrix(of=memory.unsafe_ptr(), stride=ranks)

    comptime if factored != 0:
        var tasks = task_count(rows * ranks * inner, host)

        def reduce(task: Int) raises {imm}:
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

    def expand(task: Int) raises {imm}:
        var first = columns * task // tasks
        var last = columns * (task + 1) // tasks
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

    sync_parallelize(expand, tasks, host)
    # The tasks above see this memory through pointers only.
    _ = memory^


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
