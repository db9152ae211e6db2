"""How long `max` takes until a first token, and how much memory, from bundle to bundle.

The baseline is `dense` at passthrough: its graph holds MAX's own linear layers, as they
are (MAX's own Gemma 3 does not run on a CPU). A *first* start finds an empty compile
cache, a *second* one what the first left there. Every start is a process of its own,
`max generate` for one token, timed from outside.

    python scripts/bench_start.py build/gemma3-270m --out build/bench
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from attnquant.cli.text import format_table
from attnquant.needs import serving_needs
from attnquant.plugins import installed_plugins
from attnquant.sizes import format_bytes
from attnquant.theta.bundle import open_bundle
from attnquant.theta.checkpoint import open_checkpoint
from attnquant.theta.dtypes import STORAGE_DTYPES
from attnquant.theta.writer import plan_decomposition, write_bundle
from benching import in_turn, medians, write_report

FORMULATIONS = ("dense", "gemm", "fused")
"""The baseline first."""

SECOND_TO_BASELINE = 1.3
"""At most: a second start against the baseline's second start."""

FIRST_TO_SECOND = 5.0
"""At least: a first start against the second."""

PEAK_TO_SERVED = 1.2
"""At most: resident memory on top of what there is before weights, against them."""

PARTS = {
    "weights": re.compile(r"AttnQuant: weights loaded in ([\d.]+) s"),
    "graph": re.compile(r"AttnQuant: graph \S+ built in ([\d.]+) s"),
    "compiling, or loading what was": re.compile(
        r"Compiling model took ([\d.]+) seconds"
    ),
    "the same for the sampler": re.compile(r"Compiling sampler took ([\d.]+) seconds"),
}
"""What MAX's log tells of where the time goes."""

SAMPLED_EVERY = 0.02
"""Seconds between two looks at a process's memory."""


@dataclass(frozen=True)
class Start:
    """One start of `max`.

    Attributes:
        seconds: Until it has printed its token and ended.
        before: Peak of resident bytes until the weights' file is mapped.
        peak: Peak of resident bytes.
        log: What it printed.
    """

    seconds: float
    before: int
    peak: int
    log: str

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what the log says they went into."""
        found = {name: pattern.search(self.log) for name, pattern in PARTS.items()}
        return {name: float(match[1]) for name, match in found.items() if match}

    @property
    def hit(self) -> bool:
        """Whether the decoder came out of the compile cache."""
        return "AttnQuant: compile cache: hit" in self.log


@dataclass(frozen=True)
class Case:
    """A bundle, served in a formulation.

    Attributes:
        bundle: Passthrough, in a storage dtype.
        dtype: That dtype.
        formulation: How projections are computed.
    """

    bundle: Path
    dtype: str
    formulation: str

    @property
    def name(self) -> str:
        """What it is called in the report."""
        return f"{self.formulation}, {self.dtype} bundle"

    @property
    def served(self) -> int:
        """Bytes of the weights: bfloat16 stays what it is in `fused` only."""
        needs = serving_needs(open_bundle(self.bundle), installed_plugins())
        stays = self.formulation == "fused" and self.dtype == "bfloat16"
        form = "dense" if self.formulation == "dense" else "shared"
        return needs.weights["bfloat16" if stays else "float32"][form]

    @property
    def graph(self) -> str:
        """Which graph it needs, in words."""
        narrow = self.formulation == "fused" and self.dtype == "bfloat16"
        return f"{self.formulation}{'-bfloat16' if narrow else ''}"


def start(bundle: Path, formulation: str, cache: Path) -> Start:
    """Start `max` on a bundle, with a compile cache of its own.

    Raises:
        RuntimeError: If it fails; its log is the message.
    """
    # In print, and then run: what comes before is no part of what is measured.
    printed = [
        *(str(Path(sys.executable).with_name("attnquant")), "generate"),
        *("--print-only", str(bundle)),
        *("--max-length", "1024", "--max-batch-size", "1", "--top-k", "1"),
        *("--prompt", "The capital of France is", "--max-new-tokens", "1"),
        *("--devices", "cpu"),
    ]
    environ = dict(os.environ) | {
        "ATTNQUANT_FORMULATION": formulation,
        "MODULAR_CACHE_DIR": str(cache),
        "HF_HUB_OFFLINE": "1",
        "MODULAR_TELEMETRY_ENABLED": "0",
    }
    told = subprocess.run(
        printed, env=environ, capture_output=True, text=True, check=True
    )
    command = shlex.split(told.stderr.splitlines()[-1])
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, env=environ, stdout=log, stderr=subprocess.STDOUT
        )
        before = peak = 0
        mapped = False
        while process.poll() is None:
            peak = max(peak, _peak(process.pid))
            mapped = mapped or _is_mapped(process.pid, bundle)
            if not mapped:
                before = peak
            time.sleep(SAMPLED_EVERY)
        seconds = time.perf_counter() - began
        log.seek(0)
        text = log.read()
    if process.returncode:
        raise RuntimeError(text)
    return Start(seconds, before, peak, text)


def _peak(process: int) -> int:
    """Return the most that a process had resident so far, in bytes; 0 if it is gone."""
    with suppress(OSError):
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


def _is_mapped(process: int, bundle: Path) -> bool:
    """Return whether a process has mapped a file of a bundle."""
    with suppress(OSError):
        maps = Path(f"/proc/{process}/maps").read_text(encoding="utf-8")
        return f"{bundle.resolve()}{os.sep}" in maps
    return False


def make_bundles(checkpoint: Path, out: Path) -> dict[str, Path]:
    """Write passthrough bundles in both storage dtypes."""
    source = open_checkpoint(checkpoint)
    supplied = installed_plugins().find(source.architecture)
    made = {}
    for dtype in STORAGE_DTYPES:
        plan = plan_decomposition(
            source,
            supplied.prefix_map(source.config),
            supplied.grouping(source.text_config),
            shared_blocks=source.num_layers,
            lora_rank=None,
            dtype=dtype,
        )
        made[dtype] = write_bundle(plan, out / dtype).path
    return made


def measure(cases: Sequence[Case], caches: Path, rounds: int) -> dict[str, Any]:
    """Measure first starts, one for each graph, and second starts in turn."""
    first: dict[str, Start] = {}
    for case in cases:
        if case.graph not in first:
            first[case.graph] = start(
                case.bundle, case.formulation, caches / case.graph
            )
            if first[case.graph].hit:
                raise RuntimeError(f"{case.name}: the first start was none")
            print(f"{case.name}: first start {first[case.graph].seconds:.0f} s")
    later: dict[str, list[Start]] = {case.name: [] for case in cases}

    def again(case: Case) -> float:
        found = start(case.bundle, case.formulation, caches / case.graph)
        if not found.hit:
            raise RuntimeError(f"{case.name}: compiled anew\n{found.log}")
        later[case.name].append(found)
        return found.seconds

    seconds = medians(
        in_turn({case.name: partial(again, case) for case in cases}, rounds)
    )
    baseline = seconds[cases[0].name]
    return {
        case.name: {
            "first": first[case.graph].seconds,
            "first_parts": first[case.graph].parts,
            "second": seconds[case.name],
            "second_parts": later[case.name][-1].parts,
            "second_to_baseline": seconds[case.name] / baseline,
            "first_to_second": first[case.graph].seconds / seconds[case.name],
            "served_bytes": case.served,
            "before_bytes": max(found.before for found in later[case.name]),
            "peak_bytes": max(found.peak for found in later[case.name]),
        }
        for case in cases
    }


def main() -> int:
    """Measure, print tables, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3, help="second starts (3)")
    parser.add_argument(
        "--formulations",
        nargs="+",
        choices=FORMULATIONS,
        default=FORMULATIONS,
        help="the first is the baseline (all)",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bundles = make_bundles(options.checkpoint, Path(scratch) / "bundles")
        cases = [
            Case(bundle, dtype, formulation)
            for formulation in options.formulations
            for dtype, bundle in bundles.items()
        ]
        found = measure(cases, Path(scratch) / "caches", options.rounds)
    print(_times(found))
    print(_memory(found))
    print(f"written to {write_report(options.out, 'bench_start', {'starts': found})}")
    return 0


def _times(found: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        (
            name,
            f"{figures['first']:.1f} s",
            f"{figures['second']:.1f} s",
            f"{figures['second_to_baseline']:.2f}",
            f"{figures['first_to_second']:.1f}",
        )
        for name, figures in found.items()
    ]
    header = (
        "case",
        "first",
        "second",
        f"to baseline (at most {SECOND_TO_BASELINE})",
        f"first to second (at least {FIRST_TO_SECOND})",
    )
    return format_table(header, rows)


def _memory(found: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, figures in found.items():
        added = figures["peak_bytes"] - figures["before_bytes"]
        rows.append(
            (
                name,
                format_bytes(figures["served_bytes"]),
                format_bytes(figures["before_bytes"]),
                format_bytes(figures["peak_bytes"]),
                f"{added / figures['served_bytes']:.2f}",
            )
        )
    header = (
        "case",
        "weights",
        "resident before",
        "peak",
        f"added, to weights (at most {PEAK_TO_SERVED})",
    )
    return format_table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
