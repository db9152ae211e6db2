"""`max` with `--custom-architectures attnquant`, run as users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemma3_support.tiny import write_tiny_checkpoint

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "build" / "gemma3-270m"
PROMPT = "The capital of France is"
CONTINUATION = (
    " the capital of the country of France. It is the largest city in France and"
)


def run(*command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command of this environment, with only these ATTNQUANT_ variables."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ATTNQUANT_")}
    offline = {"HF_HUB_OFFLINE": "1", "MODULAR_TELEMETRY_ENABLED": "0"}
    name, *arguments = map(str, command)
    return subprocess.run(
        [str(BIN / name), *arguments],
        env=clean | offline | environ,
        capture_output=True,
        text=True,
        check=False,
    )


def generate(model: Path, *flags: str, **environ: str) -> str:
    """Return what `max generate` prints; fail with its log if it fails."""
    done = run(
        *("max", "generate", "--model", model, "--custom-architectures", "attnquant"),
        *("--devices", "cpu", "--prompt", PROMPT, "--max-new-tokens", "16"),
        *("--max-length", "1024", *flags),
        **environ,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


FLOAT32 = ("--quantization-encoding", "float32")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("command-line") / "bundle"
    done = run("attnquant", "decompose", CHECKPOINT, "--out", out, "--blocks", "18")
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.real_model
@pytest.mark.parametrize("formulation", ["gemm", "dense"])
def test_the_real_model_continues_as_recorded(bundle: Path, formulation: str) -> None:
    environ = {"ATTNQUANT_FORMULATION": formulation}
    raw = generate(CHECKPOINT, *FLOAT32, ATTNQUANT_BLOCKS="18", **environ)
    assert CONTINUATION in raw
    assert CONTINUATION in generate(bundle, *FLOAT32, **environ)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "tiny", dtype="bfloat16")


def test_a_missing_flag_gets_an_error_that_names_it(tiny: Path) -> None:
    done = run(
        *("max", "generate", "--model", tiny, "--custom-architectures", "attnquant"),
        *("--devices", "cpu", "--prompt", PROMPT, "--max-new-tokens", "16"),
    )
    assert done.returncode != 0
    assert "--quantization-encoding float32" in done.stderr + done.stdout


@pytest.mark.gpu_compile
def test_the_bfloat16_graph_compiles_for_a_gpu_that_is_not_there(tiny: Path) -> None:
    done = run(
        *("max", "warm-cache", "--model", tiny, "--custom-architectures", "attnquant"),
        *("--devices", "gpu", "--target", "cuda:sm_90", "--max-length", "1024"),
        ATTNQUANT_BLOCKS="3",
        ATTNQUANT_RANK="16",
    )
    assert done.returncode == 0, done.stderr[-3000:]
