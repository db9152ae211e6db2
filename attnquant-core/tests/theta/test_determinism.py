"""The same checkpoint gives the same bundle: bit for bit, or to a stated tolerance."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from attnquant.theta import reconstruct
from attnquant.theta.bundle import open_bundle
from core_support.bundles import write_tiny_statistics
from core_support.processes import environment, python
from core_support.tiny import SHAPES, tiny_config, tiny_weights, write_checkpoint

TESTS = str(Path(__file__).parents[1])
SIZE = 200
TOLERANCE = 1e-5
"""Of rebuilt weights, relative to the largest, over numbers of threads."""

WRITE = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from attnquant.theta.statistics import open_statistics
from attnquant.theta.writer import write_bundle
from core_support.bundles import plan

statistics = open_statistics(Path(sys.argv[4])) if sys.argv[4] else None
ready = plan(Path(sys.argv[2]), blocks=int(sys.argv[5]), rank=16, statistics=statistics)
write_bundle(ready, Path(sys.argv[3]))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    weights = tiny_weights(3, shapes=dict.fromkeys(SHAPES, (SIZE, SIZE)))
    return write_checkpoint(tmp_path / "model", weights, tiny_config(3))


@pytest.mark.skipif(sys.platform != "linux", reason="BLAS elsewhere has other settings")
@pytest.mark.parametrize("method", ["mean-svd", "weighted"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_runs_agree_over_processes_and_numbers_of_threads(
    tmp_path: Path, model: Path, method: str, blocks: int
) -> None:
    statistics: Path | str = ""
    if method == "weighted":
        statistics = write_tiny_statistics(
            tmp_path / "statistics", model, tokens=2 * SIZE
        ).path
    for name, threads in {"one": "1", "again": "1", "two": "2"}.items():
        out = tmp_path / name
        done = python(
            WRITE,
            *(TESTS, model, out, statistics, blocks),
            env=environment(OPENBLAS_NUM_THREADS=threads),
        )
        assert done.stderr == ""
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    bundles = [open_bundle(tmp_path / name) for name in ("one", "two")]
    one, two = (
        reconstruct(bundle.checkpoint.tensors, bundle.info.layout) for bundle in bundles
    )
    for name, weight in one.items():
        scale = float(np.abs(weight).max())
        np.testing.assert_allclose(weight, two[name], rtol=0, atol=TOLERANCE * scale)
