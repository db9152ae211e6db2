"""MAX's own compile cache, damaged: what MAX does with it, and what AttnQuant does.

Where MAX comes to do this by itself, the tests of MAX alone fail, and the check before
every start has lost its reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Prints what a tiny graph of a name makes of 1: the factor that is compiled into it.
SCRIPT = """
import logging, sys
import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from attnquant.serving.compile_cache import CheckedCache

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
name, factor, checked = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "checked"
cache = CheckedCache() if checked else None
type = TensorType(DType.float32, ["n"], DeviceRef.CPU())
with Graph(name, input_types=[type]) as graph:
    graph.output(graph.inputs[0].tensor * factor)
model = InferenceSession(devices=[CPU()]).load(graph)
if cache:
    cache.loaded(name)
(found,) = model.execute(np.ones(3, np.float32))
print("answer", found.to_numpy()[0], flush=True)
"""


class Starts:
    """Processes that share a compile cache of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, name: str, factor: int, *, checked: bool = True
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(sys.executable, "-c", SCRIPT, name, str(factor)),
                "checked" if checked else "MAX alone",
            ],
            env=dict(os.environ) | {"MODULAR_CACHE_DIR": str(self.folder)},
            capture_output=True,
            text=True,
            check=False,
        )

    def entry(self, name: str) -> Path:
        """Return the file of a graph."""
        (found,) = (
            path
            for path in self.folder.glob(".max_cache/mof/mef/*/*")
            if f"{name}$init".encode() in path.read_bytes()[:4096]
        )
        return found


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    starts = Starts(tmp_path_factory.mktemp("cache"))
    for name, factor in (("three", 3), ("five", 5)):
        done = starts(name, factor)
        assert answer(done) == factor
        kept = f"compile cache: miss: compiled, and kept as {starts.entry(name)}"
        assert kept in done.stderr
    return starts


def answer(done: subprocess.CompletedProcess[str]) -> float:
    assert done.returncode == 0, done.stderr
    found = re.search(r"^answer (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return float(found[1])


def test_a_second_start_hits(starts: Starts) -> None:
    done = starts("three", 3)
    assert answer(done) == 3
    assert f"compile cache: hit, {starts.entry('three')}" in done.stderr


def test_a_truncated_graph_stops_max_alone_and_is_compiled_anew_by_us(
    starts: Starts,
) -> None:
    entry = starts.entry("three")
    entry.write_bytes(entry.read_bytes()[:1000])
    for _ in range(2):
        alone = starts("three", 3, checked=False)
        assert alone.returncode != 0
        assert "stored hash and computed hash did not match" in alone.stderr
    mended = starts("three", 3)
    assert answer(mended) == 3
    assert f"WARNING AttnQuant: removed {entry} from the compile" in mended.stderr
    assert "compile cache: miss" in mended.stderr
    assert answer(starts("three", 3, checked=False)) == 3


def test_the_graph_of_another_is_run_by_max_alone_and_compiled_anew_by_us(
    starts: Starts,
) -> None:
    entry = starts.entry("three")
    entry.write_bytes(starts.entry("five").read_bytes())
    assert answer(starts("three", 3, checked=False)) == 5
    mended = starts("three", 3)
    assert answer(mended) == 3
    assert "it was exchanged" in mended.stderr
