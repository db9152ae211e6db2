"""Everything about the fused kernel that only a GPU can show, in one run.

On a machine with MAX and a GPU, from the root of the repository:

    python scripts/gpu_check.py

It needs attnquant-core, attnquant-kernels and attnquant-gemma3 installed, and nothing
else. In order: the op against the oracle in float64, over odd shapes and real ones;
a tiny random Gemma 3 in bfloat16, `fused` against `gemm` and `dense`; and the time of
the op as a ratio to MAX's own matmul. Exit code 0 if all held, 1 if not, 2 if there
is no GPU. `--device cpu` rehearses the same checks in float32 without one.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
from max.driver import CPU, Accelerator, Buffer, Device, accelerator_count
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue

from attnquant.testing.in_process import InProcessModel
from attnquant.testing.metrics import compare_logits
from attnquant.testing.parity import make_bundle
from attnquant_kernels import generated_linear as oracle
from attnquant_kernels import mojo_package
from attnquant_kernels.graph import Projection, generated_linear

Array = npt.NDArray[Any]

SHAPES = [
    # rows, in, out, r
    (1, 64, 64, 8),
    (1, 640, 2048, 16),
    (3, 37, 65, 5),
    (8, 2560, 10240, 64),
    (9, 641, 130, 17),
    (64, 640, 2048, 0),
    (300, 2048, 640, 64),
    (512, 2560, 2048, 16),
]
TIMED = [(1, 2560, 10240, 16), (8, 2560, 10240, 16), (512, 2560, 10240, 16)]
ROUNDS = 20
PROMPT = [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9]


class Kind(NamedTuple):
    """A kind of device, and what is computed in there.

    Attributes:
        devices: MAX's name for ``--devices``.
        encoding: MAX's name of the dtype.
        dtype: The dtype.
        numpy_dtype: The same for numpy.
        unit: Half the distance from 1 to its next number.
        limit: The most that two computations of one model's logits may be apart:
            cosine distance, and Kullback-Leibler divergence in nats. For bfloat16,
            what MAX itself allows for Gemma 3 1B.
    """

    devices: str
    encoding: str
    dtype: DType
    numpy_dtype: np.dtype[Any]
    unit: float
    limit: tuple[float, float]


GPU = Kind(
    "gpu",
    "bfloat16",
    DType.bfloat16,
    np.dtype(ml_dtypes.bfloat16),
    2.0**-8,
    (1.3e-3, 0.10),
)
REHEARSAL = Kind(
    "cpu", "float32", DType.float32, np.dtype(np.float32), 2.0**-24, (1e-5, 1e-5)
)


class Decomposition(NamedTuple):
    """What the tiny model is decomposed to; r is a multiple of 8, as GPUs need it."""

    shared_blocks: int | None = 3
    rank: int = 16
    families: str = "all"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--only", choices=("op", "model", "time"), default=None)
    options = parser.parse_args()
    if options.device == "gpu" and not accelerator_count():
        print("no GPU here: nothing was checked", file=sys.stderr)
        return 2
    kind = GPU if options.device == "gpu" else REHEARSAL
    bench = Bench(kind, Accelerator() if kind is GPU else CPU())
    print(f"device: {bench.device.label} {bench.device.api}")
    failed: list[str] = []
    parts = {
        "op": partial(check_op, bench),
        "time": partial(time_op, bench),
        "model": partial(check_model, kind),
    }
    for name, part in parts.items():
        if options.only in {None, name}:
            started = time.perf_counter()
            failed += part()
            print(f"{name}: took {time.perf_counter() - started:.0f} s", flush=True)
    print("FAILED: " + ", ".join(failed) if failed else "all checks passed")
    return 1 if failed else 0


@dataclass
class Bench:
    """A device with what runs on it."""

    kind: Kind
    device: Device

    def __post_init__(self) -> None:
        devices = [CPU()] if self.kind is REHEARSAL else [CPU(), self.device]
        self.session = InferenceSession(devices=devices)

    def load(
        self,
        name: str,
        shapes: Sequence[tuple[str, ...]],
        forward: Callable[..., TensorValue],
    ) -> Model:
        """Compile a function of tensors of these (symbolic) shapes."""
        device = DeviceRef.from_device(self.device)
        types = [TensorType(self.kind.dtype, shape, device) for shape in shapes]
        package = [mojo_package()]
        with Graph(name, input_types=types, custom_extensions=package) as graph:
            graph.output(forward(*[value.tensor for value in graph.inputs]))
        return self.session.load(graph)

    def load_op(self, *, factored: bool) -> Model:
        """Compile the op for any shape."""
        shapes = [("rows", "in"), ("out", "in"), ("out", "r"), ("r",), ("r", "in")]
        return self.load(
            "factored" if factored else "plain",
            shapes if factored else shapes[:2],
            lambda x, *weights: generated_linear(x, [Projection(*weights)]),
        )

    def operands(self, rows: int, inner: int, out: int, rank: int) -> list[Array]:
        """Return random x, W0 and, if there is a rank, U, s and V."""
        rng = np.random.default_rng((rows, inner, out, rank))
        shapes = [(rows, inner), (out, inner), (out, rank), (rank,), (rank, inner)]
        return [
            rng.normal(size=shape).astype(self.kind.numpy_dtype)
            for shape in shapes[: 5 if rank else 2]
        ]

    def to_buffer(self, array: Array) -> Buffer:
        """Put an array on the device."""
        if self.kind is REHEARSAL:
            return Buffer.from_numpy(array)
        bits = Buffer.from_numpy(array.view(np.uint16))
        return bits.view(DType.bfloat16, array.shape).to(self.device)

    def to_array(self, buffer: Buffer) -> npt.NDArray[np.float32]:
        """Fetch an array from the device, in float32."""
        host = buffer.to(CPU())
        if self.kind is REHEARSAL:
            return np.array(host.to_numpy())
        bits = host.view(DType.uint16, tuple(host.shape)).to_numpy()
        return np.asarray(bits.view(self.kind.numpy_dtype), np.float32)


def check_op(bench: Bench) -> list[str]:
    """Compare the op with the oracle; return what is out of bounds."""
    failed = []
    models = {factored: bench.load_op(factored=factored) for factored in (True, False)}
    for rows, inner, out, rank in SHAPES:
        operands = bench.operands(rows, inner, out, rank)
        buffers = [bench.to_buffer(array) for array in operands]
        found = bench.to_array(models[rank > 0].execute(*buffers)[0])
        x, *weights = [np.asarray(array, np.float32) for array in operands]
        exact = oracle(x, *weights)
        magnitude = oracle(np.abs(x), *[np.abs(weight) for weight in weights])
        # Sums are in float32 (Higham, section 3.1); then the result is rounded.
        terms = 2 * inner + rank + 2
        bound = bench.kind.unit * np.abs(exact) + terms * 2.0**-23 * magnitude
        worst = float(np.max(np.abs(found - exact) / bound))
        name = f"rows={rows} in={inner} out={out} r={rank}"
        print(f"op, {name}: {worst:.3f} of the error bound", flush=True)
        # Not `worst > 1`, which a NaN would pass.
        if not worst <= 1:
            failed.append(name)
    return failed


def time_op(bench: Bench) -> list[str]:
    """Print the time of the op as a ratio to MAX's own matmul of W_eff.

    Returns:
        Nothing that failed: a time is no check.
    """
    op = bench.load_op(factored=True)
    dense = bench.load("dense", [("rows", "in"), ("out", "in")], lambda x, w: x @ w.T)
    for shape in TIMED:
        buffers = [bench.to_buffer(array) for array in bench.operands(*shape)]
        cases = {
            "fused": partial(op.execute, *buffers),
            "dense": partial(dense.execute, *buffers[:2]),
        }
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(ROUNDS):
            for name, case in cases.items():
                bench.device.synchronize()
                started = time.perf_counter()
                case()
                bench.device.synchronize()
                seconds[name].append(time.perf_counter() - started)
        fused, own = (statistics.median(seconds[name]) for name in ("fused", "dense"))
        rows, inner, out, rank = shape
        print(
            f"time, rows={rows} in={inner} out={out} r={rank}:"
            f" {own / fused:.2f} times as fast as MAX's matmul of W_eff",
            flush=True,
        )
    return []


def check_model(kind: Kind) -> list[str]:
    """Compare formulations on a tiny model; return those that differ."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = make_bundle(
            tiny_checkpoint(Path(folder) / "tiny", kind.encoding),
            Decomposition(),
            Path(folder) / "bundle",
            kind.encoding,
        )
        logits = dict(served_logits(bundle, kind, ("fused", "gemm", "dense")))
    failed = []
    for other in ("gemm", "dense"):
        apart = compare_logits(logits[other], logits["fused"])
        print(f"tiny model, fused against {other}: {apart}", flush=True)
        if not all(
            found < limit for found, limit in zip(apart, kind.limit, strict=True)
        ):
            failed.append(f"model against {other}")
    return failed


def tiny_checkpoint(path: Path, dtype: str) -> Path:
    """Write the tiny random Gemma 3 of attnquant-gemma3's tests."""
    root = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(root / "attnquant-gemma3" / "tests"))
    tiny = importlib.import_module("gemma3_support.tiny")
    written: Path = tiny.write_tiny_checkpoint(path, dtype=dtype)
    return written


def served_logits(
    bundle: Path, kind: Kind, formulations: Sequence[str]
) -> Iterator[tuple[str, Array]]:
    """Serve a bundle under each formulation; yield the logits after a prompt."""
    for formulation in formulations:
        model = InProcessModel(
            bundle,
            environ={"ATTNQUANT_FORMULATION": formulation},
            max_length=1024,
            devices=kind.devices,
            encoding=kind.encoding,
        )
        (generated,) = model.generate([PROMPT])
        model.close()
        yield formulation, np.asarray(generated.logits, np.float32)


if __name__ == "__main__":
    sys.exit(main())
