"""SmolLM2-135M-Instruct, served on a CPU in float32, equals transformers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnquant.testing import digest, read_checkpoint, serving

pytestmark = pytest.mark.real_model

HERE = Path(__file__).parent
GOLDEN: dict[str, Any] = json.loads((HERE / "golden" / "smollm2.json").read_text())
RECORDS: list[dict[str, Any]] = GOLDEN["records"]
START_SECONDS = 900


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    path = Path(os.environ.get("SMOLLM2", "build/smollm2-135m-instruct"))
    if not (path / "config.json").is_file():
        pytest.fail(f"{path} is missing: run scripts/build_smollm2.py --out {path}")
    return path.resolve()


def test_the_checkpoint_is_the_one_that_was_recorded(checkpoint: Path) -> None:
    assert digest(read_checkpoint(checkpoint)[0]) == GOLDEN["source"]


def test_greedy_tokens_equal_those_of_transformers(checkpoint: Path) -> None:
    # In `dense`, the graph that the server compiles below as well.
    with serving(checkpoint, "dense") as model:
        for record in RECORDS:
            steps = len(record["greedy"])
            (found,) = model.generate([record["tokens"]], steps)
            assert found.tokens == record["greedy"], record["answer"]
        together = model.generate([record["tokens"] for record in RECORDS], steps)
    for record, found in zip(RECORDS, together, strict=True):
        assert found.tokens == record["greedy"], record["answer"]


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [
        *(str(Path(sys.executable).parent / "max"), "serve"),
        *("--model", str(checkpoint), "--custom-architectures", "attnquant"),
        *("--devices", "cpu", "--quantization-encoding", "float32"),
        *("--max-length", "1024", "--port", str(port)),
    ]
    variables = {"HF_HUB_OFFLINE": "1", "MODULAR_TELEMETRY_ENABLED": "0"}
    with (tmp_path / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | variables | {"ATTNQUANT_FORMULATION": "dense"},
            stdout=log,
            stderr=log,
            # A group of its own, so that the worker ends with it.
            start_new_session=True,
        )
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def test_the_chat_template_works_through_max_serve(
    server: str, checkpoint: Path
) -> None:
    openai = pytest.importorskip("openai", reason="MAX brings it")
    client = openai.OpenAI(base_url=server, api_key="none", timeout=120)
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            client.models.list()
            break
        except openai.APIError:
            assert time.monotonic() < deadline, "max serve did not answer"
            time.sleep(1)
    for record in RECORDS:
        if record["messages"] is None:
            continue
        answer = client.chat.completions.create(
            model=str(checkpoint),
            messages=record["messages"],
            max_tokens=len(record["greedy"]),
            temperature=0,
        )
        assert answer.choices[0].message.content == record["answer"]
        assert answer.usage.prompt_tokens == len(record["tokens"])
