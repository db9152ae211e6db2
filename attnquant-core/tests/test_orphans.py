"""A worker of MAX's ends when its server was killed, and no other process does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnquant.orphans import WORKER, end_with_server

# A server, killed as soon as its worker has said what its process is.
SERVER = """
import multiprocessing, os, sys, time
from attnquant.orphans import end_with_server

def work(queue):
    watch = end_with_server()
    queue.put((os.getpid(), watch is not None))
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    context.Process(target=work, args=(queue,), name=sys.argv[1]).start()
    print(*queue.get(), flush=True)
    time.sleep(600)
"""


def run_and_kill(script: Path, worker: str) -> tuple[int, bool]:
    """Run the server, kill it, and return its worker and whether that watches."""
    with subprocess.Popen(
        [sys.executable, str(script), worker],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ),
        text=True,
    ) as server:
        assert server.stdout is not None
        pid, watches = server.stdout.readline().split()
        server.kill()
        server.wait()
        # The worker holds the pipes; who waits for their end waits for it.
        server.stdout.close()
        assert server.stderr is not None
        server.stderr.close()
    return int(pid), watches == "True"


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return path


def test_a_worker_ends_with_its_server(script: Path) -> None:
    pid, watches = run_and_kill(script, WORKER)
    assert watches
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_of_anybody_else_is_left_alone(script: Path) -> None:
    pid, watches = run_and_kill(script, "Process-1")
    try:
        assert not watches
        time.sleep(1)
        assert is_running(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_process_that_nobody_spawned_watches_nothing() -> None:
    assert end_with_server() is None
