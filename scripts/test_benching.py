"""Tests of what the benchmarks share."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

# scripts/ is no package, and pytest's importlib mode leaves it off the path.
sys.path.insert(0, str(Path(__file__).parent))

import benching

PNG = b"\x89PNG\r\n\x1a\n"


def test_cases_run_in_turn_and_back_after_an_untimed_run() -> None:
    calls: list[str] = []
    cases = {name: lambda name=name: calls.append(name) for name in "ab"}

    seconds = benching.interleaved(cases, 3)

    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def test_times_are_seconds_of_the_case_alone() -> None:
    cases = {"slow": lambda: time.sleep(0.03), "none": lambda: None}

    found = benching.medians(benching.interleaved(cases, 3))

    assert found["slow"] >= 0.03
    assert found["none"] < 0.03


def test_median_ignores_one_run_that_was_disturbed() -> None:
    assert benching.medians({"a": [1.0, 90.0, 2.0]}) == {"a": 2.0}


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_copy_moves_every_byte_and_counts_reads_and_writes(threads: int) -> None:
    copy = benching.Copy(threads, cache=1000)

    copy()

    targets = [target for _, target in copy._pairs]  # noqa: SLF001
    assert len(targets) == threads
    assert all(target.all() for target in targets)
    assert copy.nbytes == 2 * sum(target.nbytes for target in targets)
    assert copy.nbytes >= 2 * 1000


def test_the_largest_cache_is_found_among_all(tmp_path: Path) -> None:
    for index, size in enumerate(["48K", "64K", "2M", "491520K"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")

    assert benching.largest_cache(tmp_path) == 480 << 20


def test_a_report_names_the_machine_and_keeps_its_figures(tmp_path: Path) -> None:
    path = benching.write_report(tmp_path / "new", "some", {"ratio": 2.5})

    report = json.loads(path.read_text())
    assert path == tmp_path / "new" / "some.json"
    assert report["ratio"] == 2.5
    assert report["machine"]["cores"] >= 1


def test_a_panel_has_the_labels_of_all_its_series() -> None:
    panel = benching.Panel("t", "x", {"one": {"b": 1, "a": 2}, "two": {"c": 3, "a": 4}})

    assert panel.labels == ["b", "a", "c"]


def test_bars_are_drawn_as_png(tmp_path: Path) -> None:
    panels = [
        benching.Panel("One", "tokens/s", {"s": {"a": 1.0, "b": 2.0}}, mark=1.0),
        benching.Panel("Two", "ratio", {"s": {"a": 1.0}, "t": {"b": 2.0}}),
    ]

    path = benching.write_bars(tmp_path, "figures", panels)

    assert path.read_bytes().startswith(PNG)
