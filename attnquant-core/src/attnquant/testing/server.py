"""`max serve` on a CPU for a while, for tests that talk to it as clients do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import openai

START_SECONDS = 900
"""A first start compiles; on two busy cores that takes minutes."""


def environment() -> dict[str, str]:
    """Return this process's environment without ``ATTNQUANT_`` variables, offline."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ATTNQUANT_")}
    return clean | {"HF_HUB_OFFLINE": "1", "MODULAR_TELEMETRY_ENABLED": "0"}


def flags(model: Path) -> list[str]:
    """Return MAX's flags for a model on a CPU."""
    return [
        *("--model", str(model), "--custom-architectures", "attnquant"),
        *("--devices", "cpu", "--quantization-encoding", "float32"),
        *("--max-length", "1024"),
    ]


@contextmanager
def served(model: Path, log: IO[bytes]) -> Iterator[openai.OpenAI]:
    """Serve a checkpoint or bundle; give a client, once it answers.

    Args:
        model: The directory.
        log: Where the server's output goes.
    """
    port = _free_port()
    server = subprocess.Popen(  # noqa: S603 (our own interpreter's `max`)
        [
            str(Path(sys.executable).with_name("max")),
            *("serve", *flags(model), "--port", str(port)),
        ],
        env=environment(),
        stdout=log,
        stderr=log,
        # A group of its own, so that the workers end with it.
        start_new_session=True,
    )
    try:
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="none",
            timeout=120,
            max_retries=0,
        )
        _wait_until_served(client, server)
        yield client
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_served(client: openai.OpenAI, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, f"max serve ended with {server.returncode}"
        try:
            client.models.list()
        except (openai.APIConnectionError, openai.InternalServerError):
            time.sleep(1)
        else:
            return
    msg = f"max serve did not answer within {START_SECONDS} s"
    raise TimeoutError(msg)
