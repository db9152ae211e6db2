"""Benchmarks, as ratios of figures taken in one run, interleaved.

What is compared with what:

- the plain decomposition of the largest projections with a full SVD of each matrix;
- decoding one token under `gemm`, and with a shared base, with `dense` (stock linears).

Machines differ and are shared: a ratio within a run says something, a time does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from attnquant.cli.text import format_table
from attnquant.plugins import installed_plugins
from attnquant.testing.in_process import InProcessModel
from attnquant.theta.checkpoint import open_checkpoint
from attnquant.theta.lowrank import truncated_svd
from attnquant.theta.writer import plan_decomposition, write_bundle

ROUNDS = 5
TOKENS = 16
PROMPT = [2, 818, 5279, 529, 7001, 563]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    ratios = {**_decomposition(), **_decoding(options.checkpoint)}
    options.out.mkdir(parents=True, exist_ok=True)
    report = options.out / "bench.json"
    report.write_text(json.dumps(ratios, indent=2) + "\n", encoding="utf-8")
    rows = [(name, f"{ratio:.2f}") for name, ratio in ratios.items()]
    print(format_table(("what", "times faster"), rows))
    print(f"written to {report}")
    return 0


def _medians(what: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each, run in turn so that noise hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in what}
    for _ in range(ROUNDS):
        for name, run in what.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _decomposition() -> dict[str, float]:
    rng = np.random.default_rng(0)
    residual = rng.normal(size=(2048, 640)).astype(np.float32)
    float32 = np.dtype(np.float32)
    medians = _medians(
        {
            "full": lambda: np.linalg.svd(residual, full_matrices=False),
            "plain": lambda: truncated_svd(residual, 64, float32),
        }
    )
    name = "decompose 2048x640 at r=64, against a full SVD"
    return {name: medians["full"] / medians["plain"]}


def _decoding(checkpoint: Path) -> dict[str, float]:
    source = open_checkpoint(checkpoint)
    supplied = installed_plugins().find(source.architecture)
    layers = source.num_layers
    with tempfile.TemporaryDirectory() as folder:
        bundles = {}
        for name, blocks, rank in (("passthrough", layers, None), ("G=1 r=16", 1, 16)):
            plan = plan_decomposition(
                source,
                supplied.prefix_map(source.config),
                supplied.grouping(source.text_config),
                shared_blocks=blocks,
                lora_rank=rank,
            )
            bundles[name] = write_bundle(plan, Path(folder) / str(blocks)).path
        cases = {
            "dense": (bundles["passthrough"], "dense"),
            "gemm at passthrough": (bundles["passthrough"], "gemm"),
            "gemm at G=1 r=16": (bundles["G=1 r=16"], "gemm"),
        }
        models = {
            name: InProcessModel(
                path, environ={"ATTNQUANT_FORMULATION": formulation}, max_length=1024
            )
            for name, (path, formulation) in cases.items()
        }
        medians = _medians({name: _generation(model) for name, model in models.items()})
        for model in models.values():
            model.close()
    dense = medians.pop("dense")
    return {
        f"decode {TOKENS} tokens, {name}, against dense": dense / median
        for name, median in medians.items()
    }


def _generation(model: InProcessModel) -> Callable[[], object]:
    return lambda: model.generate([PROMPT], TOKENS)


if __name__ == "__main__":
    sys.exit(main())
