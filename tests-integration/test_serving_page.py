"""Every command of the page "Serving" is run, on a tiny model in the place of its own.

The bundle is served once: the client of the page asks it, as a newcomer's would.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from attnquant.testing.server import START_SECONDS, environment, free_port
from gemma3_support import golden
from gemma3_support.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
GOLDEN = golden.load(ROOT / "attnquant-gemma3" / "tests" / "golden" / "tiny.npz")

TESTED_ELSEWHERE = {"warm-cache"}
"""Compiling for a GPU that is not there takes a test of its own, `gpu_compile`."""


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """Return the page's commands, in words and in order."""
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


class Newcomer:
    """Somebody in a folder with a checkpoint, who types what the page says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.environ = environment()

    def words(self, words: list[str]) -> list[str]:
        """Return a command of the page as it is run here."""
        line = shlex.join(words)
        # A tiny model has 8 layers, and its graph with 3 bands is one that is compiled
        # for other tests as well.
        line = line.replace("--blocks 18", "--blocks 3 --rank 4")
        line = line.replace("--port 8000", f"--port {self.port}")
        if words[0] == "uv":
            # Looked at and built, with nothing else installed or asked for.
            line += (
                f" --dry-run --no-deps --no-build-isolation --python {sys.executable}"
            )
        program, *rest = shlex.split(line)
        return [str(BIN / program), *rest]

    def run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command that ends."""
        environ = dict(self.environ)
        if words[:2] == ["attnquant", "cache"]:
            # Not the cache that the other tests need.
            environ["MODULAR_CACHE_DIR"] = str(self.folder / "cache")
        return subprocess.run(
            self.words(words),
            cwd=ROOT if words[0] == "uv" else self.folder,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Newcomer:
    folder = tmp_path_factory.mktemp("newcomer")
    write_tiny_checkpoint(folder / "CHECKPOINT", **GOLDEN.source("tied").recipe)
    return Newcomer(folder)


@pytest.fixture(scope="module")
def server(newcomer: Newcomer) -> Iterator[Path]:
    """Serve as the page says, until the log says that it is ready; give the log."""
    (serve,) = (words for words in commands() if words[:2] == ["attnquant", "serve"])
    path = newcomer.folder / "serve.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            newcomer.words(serve),
            cwd=newcomer.folder,
            env=newcomer.environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while "Server ready" not in path.read_text(encoding="utf-8"):
            assert process.poll() is None, path.read_text(encoding="utf-8")
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield path
    finally:
        os.killpg(process.pid, 15)
        process.wait(timeout=60)


def test_commands_that_end_do_so_in_order_and_well(newcomer: Newcomer) -> None:
    ran = []
    for words in commands():
        if words[:2] == ["attnquant", "serve"] or words[1] in TESTED_ELSEWHERE:
            continue
        done = newcomer.run(words)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
        ran.append(words[:2])
    assert ["attnquant", "generate"] in ran
    assert ["max", "generate"] in ran


def test_the_printed_command_is_the_one_of_the_page(newcomer: Newcomer) -> None:
    found = [words for words in commands() if words[1] == "generate"]
    (ours, theirs) = found
    assert (ours[0], theirs[0]) == ("attnquant", "max")
    done = newcomer.run([*ours[:2], "--print-only", *ours[2:]])
    assert shlex.split(done.stderr)[1:] == theirs[1:]


def test_the_client_of_the_page_gets_an_answer(
    newcomer: Newcomer, server: Path
) -> None:
    (script,) = blocks("python")
    script = script.replace("localhost:8000", f"localhost:{newcomer.port}")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        # Once MAX is imported, the process's own environment leads Python astray.
        env=newcomer.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr}{server.read_text(encoding='utf-8')}"
    assert done.stdout.strip()
    url = f"http://localhost:{newcomer.port}/v1/models"
    (model,) = httpx.get(url).json()["data"]
    assert model["id"] == "gemma3-270m"


def test_the_log_says_what_the_page_says_it_does(server: Path) -> None:
    log = server.read_text(encoding="utf-8")
    (shown,) = (block for block in blocks("text") if "is served by plugin" in block)
    for line in shown.splitlines():
        # Numbers, sizes and paths are another's.
        fixed = re.split(r"[\w./-]*\d[\w./-]*(?: [kMG]?B)?", line)
        pattern = ".+".join(map(re.escape, fixed))
        assert re.search(pattern, log), line
