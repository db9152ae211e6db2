"""The op `attnquant_generated_linear`: projections of one input, each a base and a
low-rank term, without building their effective weights."""

import extensibility
from extensibility import InputTensor, InputVariadicTensors, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.bit import pop_count

from .cpu import HostContext, multiply_share, task_count
from .matrix import Matrix


@extensibility.register("attnquant_generated_linear")
struct GeneratedLinear:
    """Computes ``y = [x·W0ᵀ + ((x·Vᵀ)·s)·Uᵀ]`` of all projections, side by side."""

    @staticmethod
    def execute[
        target: StaticString, projections: Int, factored: Int
    ](
        y: OutputTensor[dtype=DType.float32, rank=2, ...],
        x: InputTensor[dtype=DType.float32, rank=2, ...],
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
        comptime dtype = weights.dtype
        var host = Pointer(to=ctx).unsafe_bitcast[HostContext]()[]
        var rows = x.dim_size(0)
        var inner = x.dim_size(1)
        var input = Matrix(of=x.unsafe_ptr(), stride=inner)
        var output = Matrix(of=y.unsafe_ptr(), stride=y.dim_size(1))
        var outs = y.dim_size(1)

        var ranks = 0
        comptime for p in range(projections):
            comptime if _has_factors(factored, p):
                ranks += weights[_first(factored, p) + 3].dim_size(0)

        # x·Vᵀ of all projections side by side, like y.
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
                        var s = weights[at + 2].unsafe_ptr()
                        var lo = max(first - begin, 0)
                        var hi = min(last - begin, rank)
                        var part = low.part(0, begin)
                        multiply_share(
                            part, input, v, inner, part, v, 0, rows, lo, hi
                        )
                        for row in range(rows):
                            for r in range(lo, hi):
                                var scale = s[unsafe_offset=r].cast[DType.float32]()
                                part.store(row, r, part.load[1](row, r)[0] * scale)
                        begin += rank

            sync_parallelize(reduce, tasks, host)

        var tasks = task_count(rows * outs * (inner + ranks), host)

        def expand(task: Int) raises {imm}:
            var first = outs * task // tasks
            var last = outs * (task + 1) // tasks
            var begin = 0
            var low_begin = 0
            comptime for p in range(projections):
                comptime at = _first(factored, p)
                var outs_here = weights[at].dim_size(0)
                var w = Matrix(of=weights[at].unsafe_ptr(), stride=inner)
                var lo = max(first - begin, 0)
                var hi = min(last - begin, outs_here)
                var part = output.part(0, begin)
                comptime if _has_factors(factored, p):
                    var rank = weights[at + 3].dim_size(0)
                    var u = Matrix(of=weights[at + 1].unsafe_ptr(), stride=rank)
                    multiply_share(
                        part,
                        input,
                        w,
                        inner,
                        low.part(0, low_begin),
                        u,
                        rank,
                        rows,
                        lo,
                        hi,
                    )
                    low_begin += rank
                else:
                    multiply_share(
                        part, input, w, inner, low, w, 0, rows, lo, hi
                    )
                begin += outs_here

        sync_parallelize(expand, tasks, host)
        _ = memory^


def _has_factors(factored: Int, projection: Int) -> Bool:
    return (factored >> projection) & 1 == 1


def _first(factored: Int, projection: Int) -> Int:
    """Return where a projection's tensors begin."""
    var below = factored & ((1 << projection) - 1)
    return projection + 3 * Int(pop_count(below))
