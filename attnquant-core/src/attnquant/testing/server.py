"""`max serve` on a CPU for a while, for tests that talk to it as clients do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import openai

START_SECONDS = 900
"""A first start compiles; on two busy cores that takes minutes."""

STOP_SECONDS = 60


def environment() -> dict[str, str]:
    """Return this process's environment without ``ATTNQUANT_`` variables, offline."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ATTNQUANT_")}
    return clean | {
        "HF_HUB_OFFLINE": "1",
        "MODULAR_TELEMETRY_ENABLED": "0",
        # The server's own sender, which the line above does not switch off.
        "MAX_SERVE_DISABLE_TELEMETRY": "1",
    }


def flags(model: Path) -> list[str]:
    """Return MAX's flags for a model on a CPU."""
    return [
        *("--model", str(model), "--custom-architectures", "attnquant"),
        *("--devices", "cpu", "--quantization-encoding", "float32"),
        *("--max-length", "1024"),
    ]


class Server:
    """One `max serve` in a process group of its own.

    Attributes:
        port: Where it listens, or will.
        process: The server; its workers are its children.
        client: Asks it; a request that takes two minutes has failed.
    """

    def __init__(
        self,
        model: Path,
        log: IO[bytes],
        *extra: str,
        environ: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
        port: int | None = None,
    ) -> None:
        """Start it, and do not wait.

        Args:
            model: A checkpoint or bundle.
            log: Where its output goes.
            extra: Flags of `max serve` besides `flags`; of two, the later wins.
            environ: Variables besides `environment`.
            before: What the command is run by, such as ``prlimit``.
            port: By default a free one.
        """
        self.port = free_port() if port is None else port
        self.process = subprocess.Popen(  # noqa: S603 (our own interpreter's `max`)
            [
                *before,
                str(Path(sys.executable).with_name("max")),
                *("serve", *flags(model), "--port", str(self.port), *extra),
            ],
            env=environment()
            # Two servers must not want one port for their metrics either.
            | {"MAX_SERVE_METRICS_ENDPOINT_PORT": str(free_port())}
            | dict(environ or {}),
            stdout=log,
            stderr=log,
            # A group of its own, so that the workers end with it.
            start_new_session=True,
        )
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1",
            api_key="none",
            timeout=120,
            max_retries=0,
        )

    def wait_until_served(self, seconds: float = START_SECONDS) -> openai.OpenAI:
        """Wait until it answers.

        Args:
            seconds: At most.

        Returns:
            The client.

        Raises:
            RuntimeError: If it ends.
            TimeoutError: If it takes longer.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                msg = f"max serve ended with {self.process.returncode}"
                raise RuntimeError(msg)
            try:
                self.client.models.list()
            except (openai.APIConnectionError, openai.InternalServerError):
                time.sleep(0.2)
            else:
                return self.client
        msg = f"max serve did not answer within {seconds} s"
        raise TimeoutError(msg)

    def wait_until_ended(self, seconds: float) -> int:
        """Wait until it ends by itself; return its exit status.

        Raises:
            subprocess.TimeoutExpired: If it takes longer.
        """
        return self.process.wait(timeout=seconds)

    def stop(self) -> None:
        """End it and its workers, politely where they listen; it may have ended."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=STOP_SECONDS)
        # Whatever did not listen.
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return


@contextmanager
def serving_with(
    model: Path,
    log: IO[bytes],
    *extra: str,
    environ: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    port: int | None = None,
) -> Iterator[Server]:
    """Start a server, as `Server` does, and end it whatever happens."""
    server = Server(model, log, *extra, environ=environ, before=before, port=port)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def served(model: Path, log: IO[bytes], *extra: str) -> Iterator[openai.OpenAI]:
    """Serve a checkpoint or bundle; give a client, once it answers.

    Args:
        model: The directory.
        log: Where the server's output goes.
        extra: Flags of `max serve` besides `flags`.
    """
    with serving_with(model, log, *extra) as server:
        yield server.wait_until_served()


def free_port() -> int:
    """Return a port that nothing listens on; something might, a moment later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
