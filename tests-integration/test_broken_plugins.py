"""MAX on an architecture whose plugin is in trouble: its output says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnquant.testing.server import serving_with
from core_support.plugins import install, supplying
from gemma3_support.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent

# An architecture that MAX registers and nobody asks for.
DECLARATION = """
from max.graph.weights import WeightsFormat
from max.pipelines.lib import SupportedArchitecture
from max.pipelines.modeling.types import PipelineTask
from attnquant_gemma3.model import AttnQuantGemma3Model
from attnquant_gemma3.model_config import AttnQuantGemma3Config

arch = SupportedArchitecture(
    name="Other",
    example_repo_ids=[],
    default_encoding="float32",
    supported_encodings={"float32"},
    pipeline_model=AttnQuantGemma3Model,
    task=PipelineTask.TEXT_GENERATION,
    tokenizer=object,
    default_weights_format=WeightsFormat.safetensors,
    context_type=object,
    config=AttnQuantGemma3Config,
)
"""


def generate(model: Path, **environ: str) -> str:
    """Ask MAX for a token, and return what it says instead."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ATTNQUANT_")}
    done = subprocess.run(
        [
            *(BIN / "max", "generate", "--model", model, "--prompt", "the"),
            *("--custom-architectures", "attnquant", "--devices", "cpu"),
            *("--quantization-encoding", "float32", "--max-new-tokens", "1"),
        ],
        env=clean | {"HF_HUB_OFFLINE": "1", "MODULAR_TELEMETRY_ENABLED": "0"} | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("broken") / "tiny")


def test_where_another_plugin_is_loaded_the_broken_one_is_explained(
    model: Path, tmp_path: Path
) -> None:
    install(tmp_path, "broken", "raise ValueError('no luck')")
    names = "gemma4,broken,gemma9"
    out = generate(model, ATTNQUANT_PLUGINS=names, PYTHONPATH=str(tmp_path))
    assert (
        "AttnQuant plugin broken (attnquant-broken 1.0) is failed: ValueError: no luck."
        " Upgrade or reinstall attnquant-broken."
    ) in out
    assert "AttnQuant plugin gemma9 (not installed) is failed" in out
    assert "AttnQuant plugin gemma3 (attnquant-gemma3 0.1.0) is disabled" in out


def test_an_architecture_of_a_broken_plugin_is_not_left_to_max(
    model: Path, tmp_path: Path
) -> None:
    install(tmp_path, "broken", supplying("Gemma3ForCausalLM"))
    names = "gemma4,broken"
    out = generate(model, ATTNQUANT_PLUGINS=names, PYTHONPATH=str(tmp_path))
    assert (
        "Gemma3ForCausalLM: expected a plugin that is loaded, found broken"
        " (attnquant-broken 1.0), which is missing dependency. No module named"
        " 'nowhere'."
    ) in out
    assert "ATTNQUANT_DISABLE=broken" in out


def test_where_none_is_loaded_every_one_is_explained(
    model: Path, tmp_path: Path
) -> None:
    install(tmp_path, "broken", "import no_such_package")
    out = generate(model, ATTNQUANT_PLUGINS="broken", PYTHONPATH=str(tmp_path))
    assert "expected at least one loaded plugin, found none" in out
    assert "Plugin broken (attnquant-broken 1.0) is missing dependency" in out
    assert "No module named 'no_such_package'. Reinstall attnquant-broken" in out
    assert "is disabled: not in ATTNQUANT_PLUGINS." in out


def test_a_worker_that_sees_other_plugins_than_its_server_stops_and_says_so(
    model: Path, tmp_path: Path
) -> None:
    source = "import multiprocessing\n" + supplying("Other")
    source += "\nif multiprocessing.parent_process(): raise ValueError('no luck')\n"
    install(tmp_path, "shy", source)
    log = tmp_path / "serve.log"
    environ = {"PYTHONPATH": str(tmp_path), "ATTNQUANT_PLUGINS": "gemma3,shy"}
    (tmp_path / "nowhere.py").write_text(DECLARATION)
    with (
        log.open("wb") as out,
        serving_with(model, out, environ=environ) as server,
    ):
        assert server.wait_until_ended(300) != 0
    text = " ".join(log.read_text(encoding="utf-8").split())
    assert "the plugins of the serving worker: expected those of the server" in text
    assert "shy: attnquant-shy 1.0" in text
