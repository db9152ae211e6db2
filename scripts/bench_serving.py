"""Serving Gemma 3 270M on a CPU: decoding, prefill and memory, as ratios.

The baseline is `dense` at passthrough: its graph holds MAX's own linear layers, as they
are, in float32 (MAX's own Gemma 3 does not run on a CPU). Every other case is measured
beside a baseline of its own group: each is a process, and one at a time is asked to
run, in turn.

    python scripts/bench_serving.py build/gemma3-270m --out build/bench
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import bench_peers as peers
from attnquant.cli.text import format_table
from attnquant.plugins import installed_plugins
from attnquant.sizes import format_bytes
from attnquant.theta.bundle import BundleInfo, open_bundle
from attnquant.theta.checkpoint import open_checkpoint
from attnquant.theta.writer import plan_decomposition, write_bundle
from benching import Panel, in_turn, medians, write_bars, write_report

PROMPT = [2, 818, 5279, 529, 7001, 563]
CHECKED = 16
"""How many tokens of the baseline's greedy text are compared with each case's."""

REQUESTS = (1, 2, 4, 8, 16)
DECODE_PROMPT = 32
PREFILLS = (32, 128, 512)
MAX_LENGTH = 1024
VOCABULARY = 200_000
"""Prompts are random tokens below this, all of them ordinary."""

BASELINE = "dense"
RANK = 16


class Runner(Protocol):
    """A model that is loaded."""

    def steps(
        self, prompts: Sequence[Sequence[int]], tokens: int
    ) -> tuple[float, float]:
        """Continue prompts of one length, greedily, all of them together.

        Returns:
            Seconds until every prompt has its first token, and seconds of each later
            step, which gives every prompt one more; 0 if there is none.
        """
        ...

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Continue one prompt."""
        ...


class MaxRunner:
    """A bundle, served by MAX in this process."""

    def __init__(self, path: Path, formulation: str) -> None:
        """Load; compile if MAX's cache does not have the graph."""
        from attnquant.testing.in_process import InProcessModel

        self._model = InProcessModel(
            path,
            environ={"ATTNQUANT_FORMULATION": formulation},
            max_batch_size=max(REQUESTS),
            max_length=MAX_LENGTH,
        )

    def steps(
        self, prompts: Sequence[Sequence[int]], tokens: int
    ) -> tuple[float, float]:
        """Run prompts together; each step is one execution of the graph."""
        from max.pipelines.lib.generate import GenerateIterator

        contexts = [self._model.context(tokens, prompt=list(p)) for p in prompts]
        seconds = []
        with GenerateIterator.from_contexts(self._model.pipeline, contexts) as batch:
            while not batch.done:
                started = time.perf_counter()
                batch.step()
                seconds.append(time.perf_counter() - started)
        if len(seconds) != tokens:
            raise RuntimeError(f"{tokens} tokens took {len(seconds)} steps of MAX")
        return seconds[0], sum(seconds[1:]) / max(tokens - 1, 1)

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Continue one prompt."""
        return self._model.generate([prompt], tokens)[0].tokens


@dataclass(frozen=True)
class Case:
    """What a worker serves.

    Attributes:
        name: What it is called in the report.
        kind: ``max``, ``llama.cpp`` or ``transformers``.
        path: Bundle, checkpoint or GGUF.
        variant: The formulation or the dtype; nothing for a GGUF.
    """

    name: str
    kind: str
    path: Path
    variant: str = ""

    def load(self) -> Runner:
        """Load it into this process."""
        threads = len(os.sched_getaffinity(0))
        if self.kind == "max":
            return MaxRunner(self.path, self.variant)
        if self.kind == "llama.cpp":
            return peers.LlamaCpp(
                self.path, requests=max(REQUESTS), length=MAX_LENGTH, threads=threads
            )
        return peers.Transformers(self.path, dtype=self.variant, threads=threads)


class Asked(Protocol):
    """What answers for a `Runner`: a worker."""

    def ask(self, method: str, *arguments: object) -> Any:
        """Call a method of the runner and return what it returns."""
        ...


@dataclass(frozen=True)
class Measure:
    """One figure of a case.

    Attributes:
        name: What it is called in the report.
        requests: Prompts at once.
        length: Tokens of each.
        tokens: Tokens each is continued by; 1 if it is the prompt that is timed.
    """

    name: str
    requests: int
    length: int
    tokens: int

    def seconds(self, worker: Asked, seed: int = 0) -> float:
        """Return seconds of a decode step, or to the first token."""
        rng = np.random.default_rng(seed)
        shape = (self.requests, self.length)
        prompts = rng.integers(10, VOCABULARY, shape).tolist()
        prefill, step = worker.ask("steps", prompts, self.tokens)
        return float(prefill if self.tokens == 1 else step)

    def rate(self, seconds: float) -> float:
        """Return tokens a second, of all requests together."""
        each = self.length if self.tokens == 1 else 1
        return self.requests * each / seconds


def measures(steps: int) -> list[Measure]:
    """Return what is measured, with `steps` decode steps where there is one request."""
    decode = [
        # Fewer steps of more requests: the times of all runs are of one order.
        Measure(f"decode, {n} in flight", n, DECODE_PROMPT, 1 + max(steps // n, 4))
        for n in REQUESTS
    ]
    prefill = [Measure(f"prefill, {n} tokens", 1, n, 1) for n in PREFILLS]
    return decode + prefill


# ---------------------------------------------------------------------------- workers


class Worker:
    """A case in a process of its own, which answers questions one by one.

    Between questions it is stopped: MAX's threads poll while they wait, and would take
    from whoever is being measured.
    """

    def __init__(self, case: Case) -> None:
        """Start it; the first `ask` or `wait` waits until it has loaded."""
        context = multiprocessing.get_context("spawn")
        self.case = case
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(case, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def wait(self) -> dict[str, int]:
        """Wait until it has loaded; return its memory in bytes."""
        loaded: dict[str, int] = self._answer()
        return loaded

    def ask(self, method: str, *arguments: object) -> Any:
        """Call a method of the worker's `Runner`, or ``memory``."""
        self._signal(signal.SIGCONT)
        self._connection.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError:
            self._process.join()
            message = f"{self.case.name}: its process ended, see above"
            raise RuntimeError(message) from None
        self._signal(signal.SIGSTOP)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, number)

    def close(self) -> None:
        """End the process."""
        self._signal(signal.SIGCONT)
        self._connection.close()
        self._process.join()


def _work(case: Case, connection: Connection) -> None:
    runner = case.load()
    connection.send(memory())
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        if method == "memory":
            connection.send(memory())
        else:
            connection.send(getattr(runner, method)(*arguments))


def memory(status: Path = Path("/proc/self/status")) -> dict[str, int]:
    """Return this process's memory in bytes: peak, resident, and of that of files."""
    fields = dict(
        line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines()
    )
    names = {"peak": "VmHWM", "resident": "VmRSS", "of_files": "RssFile"}
    return {name: 1024 * int(fields[key].split()[0]) for name, key in names.items()}


@contextmanager
def running(cases: Sequence[Case]) -> Iterator[dict[str, Worker]]:
    """Run workers for cases, loaded one after another."""
    with ExitStack() as stack:
        workers = {}
        for case in cases:
            worker = Worker(case)
            stack.callback(worker.close)
            worker.wait()
            workers[case.name] = worker
        yield workers


# ----------------------------------------------------------------------------- groups


@dataclass(frozen=True)
class Bundles:
    """The bundles that are served: passthrough and G=1, in two storage dtypes."""

    passthrough: Mapping[str, Path]
    shared: Mapping[str, Path]


def make_bundles(checkpoint: Path, out: Path) -> Bundles:
    """Decompose a checkpoint, plainly: what is measured does not depend on values."""
    source = open_checkpoint(checkpoint)
    supplied = installed_plugins().find(source.architecture)
    made: dict[int, dict[str, Path]] = {}
    for blocks in (source.num_layers, 1):
        for dtype in ("float32", "bfloat16"):
            plan = plan_decomposition(
                source,
                supplied.prefix_map(source.config),
                supplied.grouping(source.text_config),
                shared_blocks=blocks,
                lora_rank=None if blocks == source.num_layers else RANK,
                dtype=dtype,
            )
            target = out / f"G{blocks}-{dtype}"
            made.setdefault(blocks, {})[dtype] = write_bundle(plan, target).path
    return Bundles(made[source.num_layers], made[1])


def groups(checkpoint: Path, bundles: Bundles, out: Path) -> dict[str, list[Case]]:
    """Return the cases of each group, the baseline first."""
    shared = f"G=1 r={RANK}"
    wide, narrow = "float32", "bfloat16"
    baseline = Case(BASELINE, "max", bundles.passthrough[wide], "dense")
    fused = [
        Case(f"fused {dtype}", "max", bundles.passthrough[dtype], "fused")
        for dtype in (wide, narrow)
    ]
    fused_shared = [
        Case(f"fused {dtype}, {shared}", "max", bundles.shared[dtype], "fused")
        for dtype in (wide, narrow)
    ]
    gemm = [
        Case("gemm", "max", bundles.passthrough[wide], "gemm"),
        Case(f"gemm, {shared}", "max", bundles.shared[wide], "gemm"),
    ]
    found = {"gemm": [baseline, *gemm], "fused": [baseline, *fused, *fused_shared]}
    if peers.has_llama_cpp():
        ggufs = [
            Case(
                f"llama.cpp {kind}", "llama.cpp", peers.make_gguf(checkpoint, kind, out)
            )
            for kind in peers.GGUF_TYPES
        ]
        found["llama.cpp"] = [baseline, *fused, *ggufs]
    if peers.has_torch():
        torch = [
            Case(f"transformers {dtype}", "transformers", checkpoint, dtype)
            for dtype in peers.TORCH_DTYPES
        ]
        found["transformers"] = [baseline, *torch]
    return found


def compile_all(cases: Sequence[Case]) -> None:
    """Load every case of MAX once, so that no measured process compiles."""
    for case in dict.fromkeys(case for case in cases if case.kind == "max"):
        started = time.perf_counter()
        with running([case]):
            print(f"{case.name}: loads in {time.perf_counter() - started:.0f} s")


# ---------------------------------------------------------------------------- figures


def measure_group(
    cases: Sequence[Case], asked: Sequence[Measure], rounds: int
) -> dict[str, dict[str, Any]]:
    """Measure the cases of a group in turn.

    Returns:
        For each case the median seconds of each measure, its ratio to the baseline,
        the memory it took, and how many tokens of its text are the baseline's.
    """
    with running(cases) as workers:
        report: dict[str, dict[str, Any]] = {
            name: {"memory_loaded": worker.ask("memory"), "seconds": {}}
            for name, worker in workers.items()
        }
        for measure in asked:
            turns = {
                name: partial(measure.seconds, worker)
                for name, worker in workers.items()
            }
            for name, seconds in medians(in_turn(turns, rounds)).items():
                report[name]["seconds"][measure.name] = seconds
        for name, worker in workers.items():
            report[name]["memory_at_the_end"] = worker.ask("memory")
            report[name]["text"] = worker.ask("greedy", PROMPT, CHECKED)
    expected = report[BASELINE]["text"]
    for figures in report.values():
        figures["same_tokens"] = common_prefix(figures.pop("text"), expected)
        figures["times_faster"] = ratios(
            report[BASELINE]["seconds"], figures["seconds"]
        )
        figures["tokens_per_second"] = {
            measure.name: measure.rate(figures["seconds"][measure.name])
            for measure in asked
        }
    return report


def ratios(
    baseline: Mapping[str, float], seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return how many times faster than the baseline each measure is."""
    return {name: baseline[name] / value for name, value in seconds.items()}


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two texts begin with in common."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def decoded_bytes(info: BundleInfo, itemsize: int) -> int:
    """Return the bytes of all tensors, each once: what a step reads from memory.

    That is so if a shared base stays in cache from layer to layer, and if the head is
    the embedding, read whole, as in Gemma 3.

    Args:
        info: A bundle's block.
        itemsize: Bytes of an element as it is stored when served.
    """
    shapes = (shape for _, shape in info.tensors().values())
    return itemsize * sum(int(np.prod(shape)) for shape in shapes)


def prediction(passthrough: BundleInfo, shared: BundleInfo) -> dict[str, float]:
    """Return what sharing a base should give if decoding is bound by memory.

    Returns:
        The share of the layers' bytes that stays in cache, and how many times faster
        that makes a step, the head's bytes included; neither depends on the dtype.
    """
    before, after = decoded_bytes(passthrough, 1), decoded_bytes(shared, 1)
    sizes = shared.layout.tensors()
    bases = {base: int(np.prod(shape)) for base, shape in shared.layout.shapes.items()}
    again = sum(
        size * (len(shared.layout.bases[base]) - 1) for base, size in bases.items()
    )
    touched = again + sum(int(np.prod(shape)) for shape in sizes.values())
    return {
        "share_of_layer_bytes_in_cache": again / touched,
        "times_faster": before / after,
    }


def sharing(report: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return how many times faster a decode step is at G=1, for each storage."""
    step = f"decode, {REQUESTS[0]} in flight"
    pairs = {name: name.partition(", G=1")[0] for name in report if ", G=1" in name}
    return {
        name: report[own]["seconds"][step] / report[name]["seconds"][step]
        for name, own in pairs.items()
        if own in report
    }


def panels(report: Mapping[str, Mapping[str, Any]]) -> list[Panel]:
    """Return the pictures: ratios in decoding and in prefill, and memory."""
    shown = {name: figures["times_faster"] for name, figures in report.items()}
    names = list(next(iter(shown.values())))
    decode = {m: {n: r[m] for n, r in shown.items()} for m in names if "decode" in m}
    prefill = {m: {n: r[m] for n, r in shown.items()} for m in names if "prefill" in m}
    axis = "times as fast as MAX's own layers in float32 (dense), same turn"
    loaded = {
        name: figures["memory_at_the_end"]["resident"] / 1e9
        for name, figures in report.items()
    }
    return [
        Panel("Decoding, by requests in flight", axis, decode, mark=1.0),
        Panel("Prefill, by length of the prompt", axis, prefill, mark=1.0),
        Panel("Resident memory after the runs", "GB", {"resident": loaded}),
    ]


def table(report: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the ratios as text."""
    names = list(report[BASELINE]["seconds"])
    header = ["times faster than dense", *names, "resident", "same text"]
    rows = [
        [
            name,
            *[f"{figures['times_faster'][measure]:.2f}" for measure in names],
            format_bytes(figures["memory_at_the_end"]["resident"]),
            f"{figures['same_tokens']}/{CHECKED}",
        ]
        for name, figures in report.items()
    ]
    return format_table(header, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="decode steps in a run")
    parser.add_argument("--group", action="append", help="measure these only")
    options = parser.parse_args()
    asked = measures(options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        bundles = make_bundles(options.checkpoint, Path(folder))
        chosen = groups(options.checkpoint, bundles, options.out)
        if unknown := set(options.group or []) - set(chosen):
            parser.error(f"no group {sorted(unknown)}, there are {list(chosen)}")
        chosen = {n: c for n, c in chosen.items() if n in (options.group or chosen)}
        compile_all([case for cases in chosen.values() for case in cases])
        found = {}
        for name, cases in chosen.items():
            found[name] = measure_group(cases, asked, options.rounds)
            print(f"\n{name}\n{table(found[name])}")
        predicted = prediction(
            open_bundle(bundles.passthrough["float32"]).info,
            open_bundle(bundles.shared["float32"]).info,
        )
    report = {
        "rounds": options.rounds,
        "groups": found,
        "sharing": {
            "predicted": predicted,
            "measured": {
                n: ratio for g in found.values() for n, ratio in sharing(g).items()
            },
        },
    }
    print(
        f"\nG=1 r={RANK}: {predicted['share_of_layer_bytes_in_cache']:.1%} of the"
        f" layers' bytes stay in cache, so a step is predicted to be"
        f" {predicted['times_faster']:.2f} times faster than at passthrough"
    )
    for name, ratio in report["sharing"]["measured"].items():
        print(f"measured, {name}: {ratio:.2f}")
    merged = {name: f for group in found.values() for name, f in group.items()}
    print(
        f"written to {write_report(options.out, 'serving', report)}"
        f" and {write_bars(options.out, 'serving', panels(merged))}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
