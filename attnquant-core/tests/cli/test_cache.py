"""`attnquant cache`: lists what MAX compiled, and makes room."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from attnquant.cli import cache as cache_command
from core_support.processes import Run

NAMES = {"old": 100, "new": 300}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    graphs = tmp_path / ".max_cache" / "mof" / "mef" / "26.7.0"
    graphs.mkdir(parents=True)
    for age, (name, size) in enumerate(NAMES.items()):
        head = f"\0{name}_graph$init\0".encode()
        (graphs / name).write_bytes(head + bytes(size - len(head)))
        os.utime(graphs / name, (86400 * age, 86400 * age))
    kernels = tmp_path / ".mogg_cache" / "a" / "26.7.0"
    kernels.mkdir(parents=True)
    (kernels / "kernel").write_bytes(bytes(50))
    monkeypatch.setattr(cache_command, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_graphs_are_listed_with_names_those_used_longest_ago_first(
    run: Run, folder: Path
) -> None:
    done = run("cache", "list")
    assert (done.code, done.err) == (0, "")
    header, old, new, total = done.out.splitlines()
    assert header.split() == ["graph", "size", "last", "used", "MAX", "file"]
    assert old.split() == ["old_graph", "100", "B", "1970-01-01", "26.7.0", "old"]
    assert new.split() == ["new_graph", "300", "B", "1970-01-02", "26.7.0", "new"]
    assert total == f"{folder}: 2 graphs of 400 B, 1 kernel files of 50 B"


def test_the_list_is_there_as_json(run: Run, folder: Path) -> None:
    listed = json.loads(run("cache", "list", "--json").out)
    assert (listed["folder"], listed["bytes"]) == (str(folder), 450)
    assert [graph["graph"] for graph in listed["graphs"]] == ["old_graph", "new_graph"]


def test_clear_removes_everything(run: Run, folder: Path) -> None:
    done = run("cache", "clear")
    assert done.out == f"{folder}: removed 3 files (450 B), 0 B left\n"
    assert list(folder.glob(".m*/**/26.7.0/*")) == []


def test_clear_down_to_a_size_keeps_what_was_used_last(run: Run, folder: Path) -> None:
    done = run("cache", "clear", "--larger-than", "350B", "--json")
    answer = json.loads(done.out)
    assert answer["removed"] == [".max_cache/mof/mef/26.7.0/old"]
    assert (answer["removed_bytes"], answer["bytes"]) == (100, 350)
    assert (folder / ".max_cache/mof/mef/26.7.0/new").exists()


@pytest.mark.parametrize("size", ["much", "-5GB", "1.5B"])
@pytest.mark.usefixtures("folder")
def test_what_is_no_size_is_wrong_usage(run: Run, size: str) -> None:
    done = run("cache", "clear", f"--larger-than={size}")
    assert done.code == 2
    assert "expected a size such as 500MB or 5GB" in done.err


def test_without_max_there_is_no_cache(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "max._core.engine", None)
    done = run("cache", "list")
    assert done.code == 1
    assert done.err.startswith("attnquant: error: the compile cache: expected MAX")
    assert 'pip install "attnquant-core[serving]"' in done.err
