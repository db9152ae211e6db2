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


@pytest.mark.gpu_compile
def test_a_decoder_with_experts_compiles(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny", dtype="bfloat16", **EXPERTS)
    compile_for_a_gpu(checkpoint, blocks=2)
