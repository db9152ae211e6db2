"""Writing a bundle takes the memory of one base, not of the model."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from attnquant.theta.bundle import open_bundle
from core_support.bundles import write_tiny_statistics
from core_support.processes import environment, python
from core_support.tiny import SHAPES, tiny_config, tiny_weights, write_checkpoint

TESTS = str(Path(__file__).parents[1])
SIZE, LAYERS = 320, 32

# RLIMIT_DATA counts what a process allocates, and not the weight files that it maps to
# read from: those can be dropped from memory at any time.
LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import numpy as np
from scipy.linalg import cho_factor, cho_solve
from attnquant.theta.statistics import open_statistics
from attnquant.theta.writer import write_bundle
from core_support.bundles import plan

statistics = open_statistics(Path(sys.argv[4])) if sys.argv[4] else None
ready = plan(Path(sys.argv[2]), blocks=int(sys.argv[5]), rank=8, statistics=statistics)
# Both libraries take their buffers once, at the first product.
square = np.eye(300, dtype=np.float32)
cho_factor(square @ square)
cho_solve(cho_factor(square.astype(float) @ square), square)
np.linalg.qr(square)
np.linalg.eigh(square)
status = Path("/proc/self/status").read_text()
now = next(int(line.split()[1]) for line in status.splitlines() if "VmData" in line)
limit = now * 1024 + int(sys.argv[6])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    write_bundle(ready, Path(sys.argv[3]))
except MemoryError:
    print("out of memory")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a limit that only Linux has")
@pytest.mark.parametrize("method", ["mean-svd", "weighted"])
def test_a_model_several_times_larger_than_memory_is_decomposed(
    tmp_path: Path, method: str
) -> None:
    weights = tiny_weights(LAYERS, shapes=dict.fromkeys(SHAPES, (SIZE, SIZE)))
    # One tensor that is copied is larger than the allowance, too.
    weights["embed_tokens.weight"] = np.ones((100_000, SIZE), np.float32)
    model = write_checkpoint(tmp_path / "model", weights, tiny_config(LAYERS), shards=2)
    source_bytes = sum(array.nbytes for array in weights.values())
    statistics: Path | str = ""
    if method == "weighted":
        statistics = write_tiny_statistics(tmp_path / "statistics", model).path
    allowance = 48_000_000
    assert source_bytes > 4 * allowance

    out = tmp_path / "bundle"
    done = python(
        LIMITED,
        *(TESTS, model, out, statistics, LAYERS // 2, allowance),
        env=environment(OPENBLAS_NUM_THREADS="1"),
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert open_bundle(out).info.method == method

    # The limit bites: one band of all layers does not fit. Moments can just be read, as
    # safetensors, unlike numpy, does not survive an allocation that fails.
    too_little = allowance // 4 if method == "mean-svd" else allowance * 3 // 4
    done = python(
        LIMITED,
        *(TESTS, model, tmp_path / "whole", statistics, 1, too_little),
        env=environment(OPENBLAS_NUM_THREADS="1"),
    )
    assert done.stdout == "out of memory\n"
