"""The fused op alone, as ratios to MAX's own matmul in the same run.

For the shape of `gate_proj` in Gemma 3 270M, 1B and 4B, for some numbers of rows and
ranks, in turn:

- `dense`: MAX's matmul of W_eff, float32; what everything is a ratio to
- `gemm`: MAX's matmuls of base and low-rank term, float32
- `fused`: the op, float32 and bfloat16 storage
- `numpy`: the matmul of W_eff

Weights rotate through more memory than the caches hold, as they do in a model, and all
lie in one block, so that pages are as large for them as for what is copied. What is
timed follows a call that is not: MAX's threads sleep a while after the last one, and to
wake them takes longer than a small product. With one row a product is a read of its
weights: its bytes a second are compared with those of copying memory, measured in the
same turns (and not after another copy, which would leave a part of it in the cache).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue

from attnquant.cli.text import format_table
from attnquant_kernels import mojo_package
from attnquant_kernels.graph import Projection, generated_linear
from benching import (
    Copy,
    Panel,
    in_turn,
    largest_cache,
    medians,
    write_bars,
    write_report,
)

Array = npt.NDArray[Any]

SHAPES = {"270M": (2048, 640), "1B": (6912, 1152), "4B": (10240, 2560)}
ROWS = (1, 8, 64, 512)
RANKS = (0, 16, 64)
PRODUCTS = 8
"""Products of one graph, so that what MAX does once a call does not weigh on each."""

RUN_BYTES = 256 << 20
"""Float32 weights that a timed run reads, at least: several calls of a small shape."""

MAX_CACHE = 512 << 20
CASES = ("dense", "fused float32", "fused bfloat16", "gemm", "numpy")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    options = parser.parse_args()
    session = InferenceSession(devices=[CPU()])
    copy = Copy(threads=2)
    found: list[Measured] = []
    settings = list(itertools.product(options.shapes, options.ranks))
    for shape, rank in settings:
        started = time.perf_counter()
        found += measure(session, copy, shape, rank, options.rounds)
        took = time.perf_counter() - started
        print(f"{shape}, r={rank}: compiled and measured in {took:.0f} s", flush=True)
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
    """One case: a compiled graph (or numpy), and weights to run it on in turn.

    Attributes:
        run: Called with x and the operands of `PRODUCTS` products.
        weights: Of one product each; together more than the caches hold.
        nbytes: Bytes of weights that a call reads.
    """

    run: Callable[[Any, Sequence[Any]], object]
    weights: Sequence[Sequence[Any]]
    nbytes: int

    def on(self, x: object) -> Callable[[], object]:
        """Return a call that goes on where the last one ended."""
        turn = itertools.cycle(self.weights)
        return lambda: self.run(
            x, [each for _ in range(PRODUCTS) for each in next(turn)]
        )


def measure(
    session: InferenceSession, copy: Copy, shape: str, rank: int, rounds: int
) -> Iterator[Measured]:
    """Measure all cases of one shape and rank, for each number of rows."""
    out_dim, in_dim = SHAPES[shape]
    shapes: list[tuple[int, ...]] = [(out_dim, in_dim)]
    if rank:
        shapes += [(out_dim, rank), (rank,), (rank, in_dim)]
    wide, narrow = Block(shapes, DType.float32), Block(shapes, DType.bfloat16)
    rotations = {
        case: rotation(session, case, narrow if "bfloat16" in case else wide)
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
        calls = 1 + RUN_BYTES // (4 * out_dim * in_dim * PRODUCTS)
        cases = {case: partial(seconds, run, calls) for case, run in runs.items()}
        cases["copy"] = partial(seconds, copy, 1, warm=False)
        times = medians(in_turn(cases, rounds))
        bandwidth = copy.nbytes / times.pop("copy")
        yield Measured(
            shape,
            rank,
            rows,
            {case: value / PRODUCTS for case, value in times.items()},
            {
                case: each.nbytes / times[case] / bandwidth
                for case, each in rotations.items()
            },
        )


def seconds(run: Callable[[], object], calls: int, *, warm: bool = True) -> float:
    """Return the seconds of a call, by default after one that is not timed."""
    if warm:
        run()
    started = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - started) / calls


class Block:
    """The weights of many products of one shape, in one piece of memory.

    Attributes:
        shapes: Of the operands of one product.
        dtype: What they are stored in.
        arrays: Those of each product: numpy's, of float32, or bits of bfloat16.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: DType) -> None:
        """Fill it with small numbers; which ones does not matter to speed."""
        self.shapes = shapes
        self.dtype = dtype
        item = np.dtype(np.uint16 if dtype == DType.bfloat16 else np.float32)
        # Each begins with a cache line.
        sizes = [-(-int(np.prod(s)) * item.itemsize // 64) * 64 for s in shapes]
        count = PRODUCTS + min(MAX_CACHE, largest_cache()) // sum(sizes)
        value = 0x3C00 if dtype == DType.bfloat16 else 2.0**-7
        memory = np.full(count * sum(sizes) // item.itemsize, value, item)
        ends = np.cumsum(sizes * count) // item.itemsize
        starts = iter([0, *ends.tolist()])
        self.arrays: list[list[Array]] = [
            [
                memory[start : start + int(np.prod(shape))].reshape(shape)
                for shape, start in zip(shapes, starts, strict=False)
            ]
            for _ in range(count)
        ]

    def buffers(self, operands: int) -> list[list[Buffer]]:
        """Return the first few operands of each product, for MAX."""
        return [
            [self._buffer(array) for array in arrays[:operands]]
            for arrays in self.arrays
        ]

    def _buffer(self, array: Array) -> Buffer:
        buffer = Buffer.from_numpy(array)
        if array.dtype == np.float32:
            return buffer
        return buffer.view(self.dtype, array.shape)


def rotation(session: InferenceSession, case: str, block: Block) -> Rotation:
    """Compile a case, for weights of a block."""
    has_factors = case == "gemm" or case.startswith("fused")
    shapes = block.shapes if has_factors else block.shapes[:1]
    size = 2 if block.dtype == DType.bfloat16 else 4
    nbytes = size * sum(int(np.prod(shape)) for shape in shapes) * PRODUCTS
    if case == "numpy":
        arrays = [arrays[:1] for arrays in block.arrays]
        return Rotation(lambda x, ws: [x @ w.T for w in ws], arrays, nbytes)
    model = compile_case(session, case, shapes, block.dtype)
    return Rotation(
        lambda x, ws: model.execute(x, *ws), block.buffers(len(shapes)), nbytes
    )


def compile_case(
    session: InferenceSession,
    case: str,
    shapes: Sequence[tuple[int, ...]],
    dtype: DType,
) -> Model:
    """Compile `PRODUCTS` products of one x, each with weights of its own.

    MAX knows the shapes of its own products when it compiles them. The op does not ask
    for them before it runs, so one graph serves all.
    """
    dims: Sequence[tuple[int | str, ...]] = shapes
    if case.startswith("fused"):
        dims = [("out", "in"), ("out", "r"), ("r",), ("r", "in")][: len(shapes)]
    return compile_graph(session, case, tuple(dims), dtype)


@lru_cache
def compile_graph(
    session: InferenceSession,
    case: str,
    dims: tuple[tuple[int | str, ...], ...],
    dtype: DType,
) -> Model:
    """Compile what `compile_case` asks for, once."""
    cpu = DeviceRef.CPU()
    x_type = TensorType(DType.float32, ("rows", dims[0][1]), cpu)
    types = [TensorType(dtype, shape, cpu) for _ in range(PRODUCTS) for shape in dims]
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
                    f"rows={m.rows}, r={m.rank}": m.ratios()[case]
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
