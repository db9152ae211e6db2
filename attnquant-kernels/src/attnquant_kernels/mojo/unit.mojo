"""Products with the matrix unit: which way is fastest for so many rows."""

from .amx import SIDE, WordsAt
from .few import multiply_few
from .matrix import Matrix
from .pieces import Strips, multiply_many


def multiply_columns[
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
    """Write columns `first` to `last` of some rows of ``y = x·wᵀ + low·uᵀ``.

    Args:
        y: ``[rows, out]``.
        x: ``[rows, inner]``.
        w: ``[out, inner]``.
        inner: Columns of x and w.
        low: ``[rows, rank]``.
        u: ``[out, rank]``.
        rank: Columns of `low` and u; with 0 there is no second product.
        first_row: The first row of x, a multiple of 16.
        last_row: The row of x to stop before.
        first: The first row of w to work on.
        last: The row of w to stop before.
        scratch: `scratch_words` of this thread's own, from a whole cache line.
    """
    comptime if dtype == DType.bfloat16:
        if last_row - first_row <= SIDE:
            multiply_few(
                y,
                x,
                rebind[Matrix[DType.bfloat16]](w),
                inner,
                low,
                rebind[Matrix[DType.bfloat16]](u),
                rank,
                first_row,
                last_row - first_row,
                first,
                last,
                scratch,
            )
            return
    multiply_many(
        y, x, w, inner, low, u, rank, first_row, last_row, first, last, scratch
    )
