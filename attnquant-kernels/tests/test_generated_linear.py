"""The op on a CPU against the oracle in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType

from attnquant_kernels import generated_linear, mojo_package
from attnquant_kernels.graph import Projection
from attnquant_kernels.graph import generated_linear as linear_op

Array = npt.NDArray[Any]
Run = Callable[[Array, Sequence[Sequence[Array]]], npt.NDArray[np.float32]]

FACTORED = (True, False, True)
"""Which of the graph's projections have a low-rank term."""

STORAGE = {
    "float32": (DType.float32, np.dtype(np.float32)),
    "bfloat16": (DType.bfloat16, np.dtype(ml_dtypes.bfloat16)),
}


@pytest.fixture(scope="module", params=list(STORAGE))
def storage(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[True, False], ids=["unit", "vectors"])
def matrix_unit(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def model(storage: str, *, matrix_unit: bool) -> Model:
    graph = make_graph(STORAGE[storage][0], matrix_unit=matrix_unit)
    return InferenceSession(devices=[CPU()]).load(graph)


@pytest.fixture(scope="module")
def run(model: Model) -> Run:
    """Run the op: x and, for each projection, W0 or W0, U, s and V."""

    def run(
        x: Array, projections: Sequence[Sequence[Array]]
    ) -> npt.NDArray[np.float32]:
        operands = [operand for operands in projections for operand in operands]
        outputs = model.execute(*[to_buffer(array) for array in (x, *operands)])
        return np.array(outputs[0].to_numpy())

    return run


def make_graph(dtype: DType, *, matrix_unit: bool) -> Graph:
    cpu = DeviceRef.CPU()
    types = [TensorType(DType.float32, ("rows", "in"), cpu)]
    for index, factored in enumerate(FACTORED):
        out, rank = f"out{index}", f"rank{index}"
        shapes = [(out, "in"), (out, rank), (rank,), (rank, "in")]
        types += [
            TensorType(dtype, shape, cpu) for shape in shapes[: 4 if factored else 1]
        ]
    name = f"generated_linear_{dtype.name}_{matrix_unit}"
    with Graph(name, input_types=types, custom_extensions=[mojo_package()]) as graph:
        x, *rest = [value.tensor for value in graph.inputs]
        projections = []
        for factored in FACTORED:
            count = 4 if factored else 1
            projections.append(Projection(*rest[:count]))
            rest = rest[count:]
        graph.output(linear_op(x, projections, matrix_unit=matrix_unit))
    return graph


def to_buffer(array: Array) -> Buffer:
    if array.dtype != ml_dtypes.bfloat16:
        return Buffer.from_numpy(array)
    bits = Buffer.from_numpy(array.view(np.uint16))
    return bits.view(DType.bfloat16, array.shape)


FEW = st.integers(0, 6)
# Around the widths of vectors and tiles, and past them.
WIDTHS = st.integers(1, 70)
ROWS = st.one_of(FEW, st.integers(7, 70))
UNIT = 2.0**-24
"""Half the distance from 1 to the next number of float32."""


def random_operands(
    rng: np.random.Generator, inner: int, outs: Sequence[int], ranks: Sequence[int]
) -> list[list[Array]]:
    return [
        [
            rng.normal(size=shape)
            for shape in ((out, inner), (out, r), (r,), (r, inner))
        ][: 4 if factored else 1]
        for out, r, factored in zip(outs, ranks, FACTORED, strict=True)
    ]


def stored(projections: Sequence[Sequence[Array]], storage: str) -> list[list[Array]]:
    dtype = STORAGE[storage][1]
    return [[array.astype(dtype) for array in arrays] for arrays in projections]


def expected(x: Array, projections: Sequence[Sequence[Array]]) -> Array:
    return np.concatenate([generated_linear(x, *arrays) for arrays in projections], 1)


def error_bound(x: Array, projections: Sequence[Sequence[Array]]) -> Array:
    """Bound the error of float32 sums, whatever their order.

    A sum of n products is off by at most ``n·u / (1 - n·u)`` times the sum of their
    magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
    The low-rank term has two sums one after the other and a product between. With a
    matrix unit, products of float32 leave out what is less than two roundings, in each
    of the two sums.
    """
    inner = x.shape[1]
    ranks = [arrays[1].shape[1] for arrays in projections if len(arrays) > 1]
    n = inner + max(ranks, default=0) + inner + 2 + 4
    magnitudes = [[np.abs(np.asarray(a, np.float64)) for a in p] for p in projections]
    return n * UNIT / (1 - n * UNIT) * expected(np.abs(x), magnitudes)


@settings(max_examples=150, deadline=None)
@given(
    rows=ROWS,
    inner=WIDTHS,
    outs_and_ranks=st.tuples(
        st.tuples(WIDTHS, WIDTHS, WIDTHS), st.tuples(FEW, FEW, st.integers(0, 40))
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_shape_is_within_the_error_bound(
    run: Run,
    storage: str,
    *,
    rows: int,
    inner: int,
    outs_and_ranks: tuple[tuple[int, ...], tuple[int, ...]],
    seed: int,
) -> None:
    outs, ranks = outs_and_ranks
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, inner)).astype(np.float32)
    projections = stored(random_operands(rng, inner, outs, ranks), storage)
    y = run(x, projections)
    assert y.shape == (rows, sum(outs))
    assert (np.abs(y - expected(x, projections)) <= error_bound(x, projections)).all()


@pytest.mark.parametrize("rows", [1, 4, 7, 12, 32, 64, 300])
def test_real_sizes_spread_over_threads_are_within_the_error_bound(
    run: Run, storage: str, rows: int
) -> None:
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 640)).astype(np.float32)
    operands = random_operands(rng, 640, (1024, 257, 255), (64, 0, 16))
    projections = stored(operands, storage)
    error = np.abs(run(x, projections) - expected(x, projections))
    assert (error <= error_bound(x, projections)).all()


@pytest.mark.parametrize("rows", [1, 33])
def test_no_output_is_left_unwritten(run: Run, storage: str, rows: int) -> None:
    # Outputs of NaN first: memory that is given out again holds them.
    rng = np.random.default_rng(0)
    projections = stored(random_operands(rng, 37, (65, 3, 130), (5, 0, 17)), storage)
    for _ in range(4):
        poisoned = run(np.full((rows, 37), np.nan, np.float32), projections)
        assert np.isnan(poisoned).all()
        assert np.isfinite(run(np.ones((rows, 37), np.float32), projections)).all()


def test_a_row_gives_the_same_alone_and_among_others(run: Run, storage: str) -> None:
    # Tiles of fewer rows have more chains of sums, which end in another order.
    rng = np.random.default_rng(1)
    x = rng.normal(size=(19, 100)).astype(np.float32)
    projections = stored(random_operands(rng, 100, (30, 20, 10), (8, 0, 4)), storage)
    together = run(x, projections)
    for row in range(len(x)):
        alone = run(x[row : row + 1], projections)
        bound = 2 * error_bound(x[row : row + 1], projections)
        assert (np.abs(alone - together[row]) <= bound).all()


def test_infinities_and_nans_stay_where_they_are(run: Run, storage: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(9, 20)).astype(np.float32)
    x[4, 19] = np.nan
    projections = stored(random_operands(rng, 20, (6, 6, 6), (3, 0, 3)), storage)
    y = run(x, projections)
    assert np.isnan(y[4]).all()
    assert np.isfinite(np.delete(y, 4, axis=0)).all()


def test_bfloat16_storage_is_widened_exactly(run: Run, storage: str) -> None:
    # One product an output: nothing is rounded, so any loss would show.
    values = np.array([[1.0], [-0.15625], [3.0], [2.0**-100], [1e30]])
    arrays = [[values], [values], [values]]
    factors = [np.zeros((5, 1)), np.zeros(1), np.zeros((1, 1))]
    arrays[0] += factors
    arrays[2] += factors
    projections = stored(arrays, storage)
    y = run(np.ones((1, 1), np.float32), projections)
    wide = np.asarray(projections[1][0], np.float32).ravel()
    np.testing.assert_array_equal(y[0, 5:10], wide)
