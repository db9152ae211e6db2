"""`attnquant decompose`: what it writes and prints."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from attnquant.theta.bundle import open_bundle
from core_support import processes
from core_support.plugins import TINY_PLUGIN, install
from core_support.processes import MAIN, Run, environment, started
from core_support.tiny import SHAPES, tiny_weights


def test_a_bundle_is_written_and_described(run: Run, model: Path) -> None:
    out = model.parent / "bundle"
    done = run("decompose", model, "--out", out, "--blocks", 2, "--rank", 3)
    assert (done.code, done.err) == (0, "")
    first, sizes, header, *rows = done.out.splitlines()
    assert first == f"{out}: 4 layers in 2 bands, rank 3, float32, method mean-svd"
    assert "times smaller" in sizes
    assert header.split("  ")[0] == "family"
    assert list(SHAPES) == [row.split()[0] for row in rows]
    layout = open_bundle(out).info.layout
    assert (layout.shared_blocks, layout.lora_rank) == (2, 3)


def test_the_summary_is_json_on_request(run: Run, model: Path) -> None:
    out = model.parent / "bundle"
    done = run("decompose", model, "--out", out, "--blocks", 2, "--rank", 3, "--json")
    summary = json.loads(done.out)
    info = open_bundle(out).info
    assert summary["bundle"] == str(out)
    assert summary["error"] == info.error
    assert (summary["shared_blocks"], summary["lora_rank"]) == (2, 3)
    assert (summary["method"], summary["dtype"]) == ("mean-svd", "float32")
    assert summary["source_bytes"] == sum(a.nbytes for a in tiny_weights(4).values())
    assert summary["ratio"] == summary["source_bytes"] / summary["bundle_bytes"]


def test_passthrough_needs_no_rank_and_has_no_error(run: Run, model: Path) -> None:
    out = model.parent / "bundle"
    done = run("decompose", model, "--out", out, "--blocks", 4, "--json")
    summary = json.loads(done.out)
    assert summary["error"] == dict.fromkeys(SHAPES, 0.0)
    assert (summary["lora_rank"], summary["ratio"]) == (0, 1.0)


def test_options_reach_the_bundle(run: Run, model: Path) -> None:
    out = model.parent / "bundle"
    options = ["--tie", "attn", "--dtype", "bfloat16", "--shard-size", "4kB"]
    done = run("decompose", model, "--out", out, "--blocks", 1, "--rank", 2, *options)
    assert done.code == 0
    bundle = open_bundle(out)
    assert bundle.info.layout.tie_families == "attn"
    assert bundle.info.dtype == "bfloat16"
    assert len(bundle.checkpoint.shards) > 1


def test_overwrite_replaces_a_bundle(run: Run, model: Path) -> None:
    out = model.parent / "bundle"
    assert run("decompose", model, "--out", out, "--blocks", 4).code == 0
    again = ["decompose", model, "--out", out, "--blocks", 2, "--rank", 1]
    assert "--overwrite" in run(*again).error()
    assert run(*again, "--overwrite").code == 0
    assert open_bundle(out).info.layout.shared_blocks == 2


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, str]:
    """Give the environment of a fresh process that has the tiny plugin."""
    home = tmp_path / "other-site-packages"
    install(home, "tiny", TINY_PLUGIN)
    return environment(home, ATTNQUANT_PLUGINS="tiny")


def test_a_fresh_process_does_the_same(model: Path, elsewhere: dict[str, str]) -> None:
    out = model.parent / "bundle"
    arguments = ["decompose", model, "--out", out, "--blocks", 2, "--rank", 3]
    done = processes.attnquant(*arguments, env=elsewhere)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{out}: 4 layers in 2 bands")
    open_bundle(out)


def test_progress_is_shown_on_a_terminal(
    model: Path, elsewhere: dict[str, str]
) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    out = model.parent / "bundle"
    subprocess.run(
        [sys.executable, "-c", MAIN, "decompose", model, "--out", out, "--blocks", "4"],
        env=elsewhere,
        stdout=subprocess.PIPE,
        stderr=theirs,
        check=True,
        timeout=600,
    )
    os.close(theirs)
    shown = ""
    # Linux ends what a closed terminal had shown with an error.
    with contextlib.suppress(OSError):
        while chunk := os.read(ours, 4096):
            shown += chunk.decode()
    os.close(ours)
    assert "decompose:" in shown
    assert f"{len(tiny_weights(4))}/{len(tiny_weights(4))}" in shown


STOPPED = """
import sys, time
from attnquant.cli import decompose
from attnquant.cli.main import main

def wait(*step):
    print("writing", flush=True)
    time.sleep(60)

decompose._show_on = lambda bar: wait
sys.exit(main())
"""


def test_ctrl_c_leaves_no_bundle_and_no_traceback(
    model: Path, elsewhere: dict[str, str]
) -> None:
    process, output = started(
        STOPPED,
        *("decompose", model, "--out", model.parent / "bundle", "--blocks", 4),
        env=elsewhere,
    )
    with process:
        assert output.readline() == "writing\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.read() == (
            "attnquant: interrupted; the same command goes on from here\n"
        )
    assert process.returncode == 130
    assert not (model.parent / "bundle").exists()
    assert (model.parent / ".bundle.partial").is_dir()
