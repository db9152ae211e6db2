"""The bfloat16 graphs compile for a GPU that is not there; nothing is run on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from gemma4_support.tiny import write_tiny_checkpoint
from gemma4_support.vision import write_multimodal_checkpoint

BIN: Final = Path(sys.executable).parent
EXPERTS: Final[dict[str, Any]] = {
    "seed": 2,
    "layer_types": "ssf",
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}


def compile_for_a_gpu(checkpoint: Path, blocks: int) -> str:
    """Compile for an H100 at rank 16, as users would; return what MAX logs."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ATTNQUANT_")}
    done = subprocess.run(
        [
            *(str(BIN / "max"), "warm-cache", "--model", str(checkpoint)),
            *("--custom-architectures", "attnquant", "--max-length", "1024"),
            *("--devices", "gpu", "--target", "cuda:sm_90"),
        ],
        env=clean
        | {
            "HF_HUB_OFFLINE": "1",
            "MODULAR_TELEMETRY_ENABLED": "0",
            "ATTNQUANT_BLOCKS": str(blocks),
            "ATTNQUANT_RANK": "16",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


@pytest.mark.gpu_compile
def test_decoder_and_vision_encoder_compile_together(tmp_path: Path) -> None:
    checkpoint = write_multimodal_checkpoint(tmp_path / "tiny", dtype="bfloat16")
    log = compile_for_a_gpu(checkpoint, blocks=4)
    assert "images are served, with MAX's own vision graph" in log


GROUPED_MATMUL = """
import sys
from max.driver import set_virtual_device_api, set_virtual_device_count
from max.driver import set_virtual_device_target_arch
set_virtual_device_api("cuda")
set_virtual_device_target_arch(sys.argv[1])
set_virtual_device_count(1)
from max.driver import Accelerator
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from max.nn.kernels import grouped_matmul_ragged
from attnquant_gemma4.layers.experts import has_grouped_matmul
gpu, cpu = DeviceRef.GPU(), DeviceRef.CPU()
types = [
    TensorType(DType.bfloat16, ("tokens", 256), gpu),
    TensorType(DType.bfloat16, (8, 512, 256), gpu),
    TensorType(DType.uint32, (9,), gpu),
    TensorType(DType.int32, (8,), gpu),
    TensorType(DType.uint32, (2,), cpu),
]
with Graph("grouped", input_types=types) as graph:
    graph.output(grouped_matmul_ragged(*(value.tensor for value in graph.inputs)))
session = InferenceSession(devices=[Accelerator()])
try:
    kept = session.compile(graph)
except RuntimeError as error:
    found = "Coord is not a value type" not in str(error.__cause__)
else:
    found = True
print("expected", has_grouped_matmul(gpu), "found", found)
"""


@pytest.mark.gpu_compile
@pytest.mark.parametrize(("target", "expected"), [("sm_90", False), ("sm_100a", True)])
def test_where_maxs_grouped_matmul_compiles(target: str, expected: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROUPED_MATMUL, target],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    # Where it compiles again, the way round it can go.
    assert f"expected {expected} found {expected}" in done.stdout, done.stderr[-2000:]


@pytest.mark.gpu_compile
def test_a_decoder_with_experts_compiles(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny", dtype="bfloat16", **EXPERTS)
    compile_for_a_gpu(checkpoint, blocks=2)
