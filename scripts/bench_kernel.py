"""The fused op alone, as ratios to MAX's own matmul in the same run.

For the shape of `gate_proj` in Gemma 3 270M, 1B and 4B, for some numbers of rows and
ranks, in turn:

- `dense`: MAX's matmul of W_eff, float32; what everything is a ratio to
- `gemm`: MAX's matmuls of base and low-rank term, float32
- `fused`: the op, float32 and bfloat16 storage
- `numpy`: the matmul of W_eff

Weights rotate through more memory than the caches hold, as they do in a model. With
one row a product is a read of its weights: its bytes a second are compared with those
of copying memory, measured in the same turns.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue
from tqdm import tqdm

from attnquant.cli.text import format_table
from attnquant_kernels import mojo_package
from attnquant_kernels.graph import Projection, generated_linear
from benching import (
    Copy,
    Panel,
    interleaved,
    largest_cache,
    medians,
    write_bars,
    write_report,
)

Array = npt.NDArray[Any]

SHAPES = {"270M": (2048, 640), "1B": (6912, 1152), "4B": (10240, 2560)}
ROWS = (1, 8, 64, 512)
RANKS = (0, 16, 64)
GRAPH_BYTES = 48 << 20
"""Float32 weights of one graph: several ops of a small shape, so that what MAX does
once a call does not weigh on each."""

MAX_OPS = 8
MAX_CACHE = 512 << 20
CASES = ("dense", "gemm", "fused float32", "fused bfloat16", "numpy")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    options = parser.parse_args()
    session = InferenceSession(devices=[CPU()])
    copy = Copy(threads=2)
    found: list[Measured] = []
    settings = list(itertools.product(options.shapes, options.ranks))
    for shape, rank in tqdm(settings, desc="shapes and ranks", disable=None):
        found += measure(session, copy, shape, rank, options.rounds)
    report = write_report(
        options.out, "kernel", {"measured": [m.json() for m in found]}
    )
    picture = write_bars(options.out, "kernel", panels(found))
    print(table(found))
    print(f"written to {report} and {picture}")
    return 0


@dataclass(frozen=True)
class Measured:
    """Medians of one shape, rank and number of rows.

    Attributes:
        shape: The model's name.
        rank: r.
        rows: Rows of x.
        seconds: Of one product, by case.
        bandwidths: Bytes of weights read a second, by case, as a share of the bytes
            that copying memory reads and writes.
    """

    shape: str
    rank: int
    rows: int
    seconds: dict[str, float]
    bandwidths: dict[str, float]

    def ratios(self) -> dict[str, float]:
        """Return how many times as fast as `dense` each case is."""
        dense = self.seconds["dense"]
        return {case: dense / seconds for case, seconds in self.seconds.items()}

    def json(self) -> dict[str, Any]:
        """Return what a report holds of it."""
        return {
            "shape": self.shape,
            "out_in": SHAPES[self.shape],
            "rank": self.rank,
            "rows": self.rows,
            "times_as_fast_as_dense": self.ratios(),
            "share_of_copy_bandwidth": self.bandwidths,
        }


@dataclass
class Rotation:
    """One case: a compiled graph (or numpy), and sets of weights to run it on in turn.

    Attributes:
        run: Called with x and a set of weights.
        sets: The sets, more than the caches hold.
        products: How many products a call computes.
        nbytes: Bytes of weights that a call reads.
    """

    run: Callable[[Any, Sequence[Any]], object]
    sets: list[list[Any]]
    products: int
    nbytes: int

    def on(self, x: object) -> Callable[[], object]:
        """Return a call that uses the next set every time."""
        turn = itertools.cycle(self.sets)
        return lambda: self.run(x, next(turn))


def measure(
    session: InferenceSession, copy: Copy, shape: str, rank: int, rounds: int
) -> Iterator[Measured]:
    """Measure all cases of one shape and rank, for each number of rows."""
    out_dim, in_dim = SHAPES[shape]
    ops = max(1, min(MAX_OPS, GRAPH_BYTES // (4 * out_dim * in_dim)))
    rotations = {
        case: rotation(session, case, shape, rank, ops)
        for case in CASES
        # Without a low-rank term there is nothing that gemm does otherwise.
        if rank or case != "gemm"
    }
    for rows in ROWS:
        x = np.random.default_rng(rows).normal(size=(rows, in_dim)).astype(np.float32)
        runs = {
            case: each.on(x if case == "numpy" else Buffer.from_numpy(x))
            for case, each in rotations.items()
        }
        times = medians(interleaved({**runs, "copy": copy}, rounds))
        bandwidth = copy.nbytes / times.pop("copy")
        yield Measured(
            shape,
            rank,
            rows,
            {case: times[case] / each.products for case, each in rotations.items()},
            {
                case: each.nbytes / times[case] / bandwidth
                for case, each in rotations.items()
            },
        )


def rotation(
    session: InferenceSession, case: str, shape: str, rank: int, ops: int
) -> Rotation:
    """Compile a case, and lay out its weights."""
    out_dim, in_dim = SHAPES[shape]
    has_factors = rank > 0 and case not in {"dense", "numpy"}
    shapes: list[tuple[int, ...]] = [(out_dim, in_dim)]
    if has_factors:
        shapes += [(out_dim, rank), (rank,), (rank, in_dim)]
    dtype = DType.bfloat16 if case == "fused bfloat16" else DType.float32
    size = 2 if dtype == DType.bfloat16 else 4
    nbytes = size * sum(int(np.prod(s)) for s in shapes) * ops
    count = 1 + min(MAX_CACHE, largest_cache()) // nbytes
    sets = [
        [weights(s, dtype, case) for _ in range(ops) for s in shapes]
        for _ in range(count)
    ]
    if case == "numpy":
        return Rotation(
            lambda x, ws: [x @ weight.T for weight in ws], sets, ops, nbytes
        )
    model = compile_case(session, case, shapes, dtype, ops)
    return Rotation(lambda x, ws: model.execute(x, *ws), sets, ops, nbytes)


def weights(shape: tuple[int, ...], dtype: DType, case: str) -> Array | Buffer:
    """Return a tensor of small numbers; which ones does not matter to speed."""
    if dtype == DType.bfloat16:
        bits = np.full(shape, 0x3C00, np.uint16)
        return Buffer.from_numpy(bits).view(dtype, shape)
    values = np.full(shape, 2.0**-7, np.float32)
    return values if case == "numpy" else Buffer.from_numpy(values)


def compile_case(
    session: InferenceSession,
    case: str,
    shapes: Sequence[tuple[int, ...]],
    dtype: DType,
    ops: int,
) -> Model:
    """Compile `ops` products of one x, each with weights of its own.

    MAX knows the shapes of its own products when it compiles them. The op does not ask
    for them before it runs, so one graph serves all.
    """
    dims: Sequence[tuple[int | str, ...]] = shapes
    if case.startswith("fused"):
        dims = [("out", "in"), ("out", "r"), ("r",), ("r", "in")][: len(shapes)]
    return compile_graph(session, case, tuple(dims), dtype, ops)


@lru_cache
def compile_graph(
    session: InferenceSession,
    case: str,
    dims: tuple[tuple[int | str, ...], ...],
    dtype: DType,
    ops: int,
) -> Model:
    """Compile what `compile_case` asks for, once."""
    cpu = DeviceRef.CPU()
    x_type = TensorType(DType.float32, ("rows", dims[0][1]), cpu)
    types = [TensorType(dtype, shape, cpu) for _ in range(ops) for shape in dims]
    name = case.replace(" ", "_")
    extensions = [mojo_package()] if case.startswith("fused") else []
    with Graph(
        name, input_types=[x_type, *types], custom_extensions=extensions
    ) as graph:
        x, *values = [value.tensor for value in graph.inputs]
        step = len(dims)
        graph.output(
            *[
                product(case, x, values[i : i + step])
                for i in range(0, len(values), step)
            ]
        )
    return session.load(graph)


def product(case: str, x: TensorValue, operands: Sequence[TensorValue]) -> TensorValue:
    """Return one product in a graph."""
    if case.startswith("fused"):
        return generated_linear(x, [Projection(*operands)])
    y = x @ operands[0].T
    if len(operands) > 1:
        _, u, s, v = operands
        y = y + ((x @ v.T) * s) @ u.T
    return y


def table(found: Sequence[Measured]) -> str:
    """Return all ratios as a table."""
    rows = [
        (
            m.shape,
            str(m.rank),
            str(m.rows),
            *[f"{m.ratios()[case]:.2f}" if case in m.seconds else "" for case in CASES],
            f"{m.bandwidths['fused float32']:.2f}" if m.rows == 1 else "",
            f"{m.bandwidths['fused bfloat16']:.2f}" if m.rows == 1 else "",
        )
        for m in found
    ]
    head = ("shape", "r", "rows", *CASES, "of copy, f32", "of copy, bf16")
    return format_table(head, rows)


def panels(found: Sequence[Measured]) -> list[Panel]:
    """Return one panel of ratios for each shape, and one of bandwidths."""
    shapes = list(dict.fromkeys(m.shape for m in found))
    speed = [
        Panel(
            f"gate_proj of Gemma 3 {shape}, {SHAPES[shape][0]} x {SHAPES[shape][1]}",
            "times as fast as MAX's matmul of W_eff",
            {
                case: {
                    f"{m.rows} rows, r={m.rank}": m.ratios()[case]
                    for m in found
                    if m.shape == shape and case in m.seconds
                }
                for case in CASES
                if case != "dense"
            },
            mark=1.0,
        )
        for shape in shapes
    ]
    bandwidth = Panel(
        "One row, out of cache: weights read a second",
        "share of the bandwidth of copying (bytes read and written)",
        {
            case: {
                f"{m.shape}, r={m.rank}": m.bandwidths[case]
                for m in found
                if m.rows == 1
            }
            for case in ("dense", "fused float32", "fused bfloat16")
        },
        mark=0.8,
    )
    return [*speed, bandwidth]


if __name__ == "__main__":
    sys.exit(main())
