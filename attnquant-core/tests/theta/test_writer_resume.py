"""Writing a bundle: the same command goes on where it was stopped, byte for byte."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnquant.errors import SettingError
from attnquant.theta import decompose, writer
from attnquant.theta.journal import Journal
from attnquant.theta.writer import Plan, write_bundle
from core_support.bundles import plan, write_tiny_statistics
from core_support.processes import environment, started
from core_support.tiny import write_tiny_checkpoint

TESTS = str(Path(__file__).parents[1])
STEPS = 4 * 7 // 2 + 6
"""Of a tiny bundle of two bands: one per base, and one per tensor that is kept."""


def contents(bundle: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(bundle.iterdir())}


def stop_after(steps: int) -> Callable[..., None]:
    left = steps

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt

    return count


def interrupted(ready: Plan, out: Path, steps: int, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_bundle(ready, out, progress=stop_after(steps), **options)
    assert not out.exists()


@pytest.fixture(params=["mean-svd", "weighted"])
def ready(tmp_path: Path, request: pytest.FixtureRequest) -> Plan:
    model = write_tiny_checkpoint(tmp_path / "model")
    if request.param == "mean-svd":
        return plan(model)
    return plan(model, statistics=write_tiny_statistics(tmp_path / "statistics", model))


@pytest.mark.parametrize("steps", [1, 2, 9, STEPS - 5, STEPS - 1, STEPS])
@pytest.mark.parametrize("jobs", [1, 3])
def test_a_run_that_goes_on_gives_the_bytes_of_one_that_was_never_stopped(
    tmp_path: Path, ready: Plan, steps: int, jobs: int
) -> None:
    out = tmp_path / "bundle"
    whole = contents(write_bundle(ready, tmp_path / "whole", shard_bytes=3000).path)
    interrupted(ready, out, steps, jobs=jobs, shard_bytes=3000)
    write_bundle(ready, out, jobs=jobs, shard_bytes=3000)
    assert whole == contents(out)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name[0] == ".") == []


@given(
    stops=st.lists(st.tuples(st.integers(1, STEPS), st.integers(1, 2)), max_size=4),
    weighted=st.booleans(),
)
@settings(max_examples=20)
def test_a_run_may_be_stopped_any_number_of_times(
    tmp_path_factory: pytest.TempPathFactory,
    *,
    stops: list[tuple[int, int]],
    weighted: bool,
) -> None:
    folder = tmp_path_factory.mktemp("resume")
    # Four layers a base: the weighted method takes turns.
    model = write_tiny_checkpoint(folder / "model", 8)
    statistics = write_tiny_statistics(folder / "s", model) if weighted else None
    ready = plan(model, statistics=statistics)
    whole = contents(write_bundle(ready, folder / "whole").path)
    for steps, jobs in stops:
        interrupted(ready, folder / "bundle", steps, jobs=jobs)
    write_bundle(ready, folder / "bundle")
    assert whole == contents(folder / "bundle")


def decomposed_bases(patch: pytest.MonkeyPatch) -> list[object]:
    seen: list[object] = []
    original = decompose.decompose_base

    def record(state_dict: Any, layout: Any, base: Any, *rest: Any) -> Any:
        seen.append(base)
        return original(state_dict, layout, base, *rest)

    patch.setattr(writer, "decompose_base", record)
    return seen


def test_what_is_done_is_not_done_again(
    tmp_path: Path, ready: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(ready, tmp_path / "bundle", 9)
    seen = decomposed_bases(monkeypatch)
    write_bundle(ready, tmp_path / "bundle")
    assert seen == list(ready.layout.bases)[9:]


@pytest.mark.parametrize(
    "options",
    [{"rank": 2}, {"blocks": 1}, {"dtype": "bfloat16"}, {"tie_families": "attn"}],
)
def test_another_setting_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    model = write_tiny_checkpoint(tmp_path / "model")
    whole = contents(write_bundle(plan(model, **options), tmp_path / "whole").path)
    interrupted(plan(model), tmp_path / "bundle", 9)
    seen = decomposed_bases(monkeypatch)
    other = plan(model, **options)
    write_bundle(other, tmp_path / "bundle")
    assert seen == list(other.layout.bases)
    assert whole == contents(tmp_path / "bundle")


def test_another_source_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_checkpoint(tmp_path / "model")
    interrupted(plan(model), tmp_path / "bundle", 9)
    raw = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(raw[:-4] + np.float32(0.5).tobytes())
    seen = decomposed_bases(monkeypatch)
    write_bundle(plan(model), tmp_path / "bundle")
    assert len(seen) == len(plan(model).layout.bases)


def test_a_journal_line_that_was_cut_off_counts_as_not_done(
    tmp_path: Path, ready: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(ready, tmp_path / "bundle", 9)
    journal = tmp_path / ".bundle.partial" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-7])
    seen = decomposed_bases(monkeypatch)
    write_bundle(ready, tmp_path / "bundle")
    assert seen == list(ready.layout.bases)[8:]


SLOWLY = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from attnquant.theta.writer import write_bundle
from core_support.bundles import plan

def show(what, done, total):
    print(done, flush=True)
    time.sleep(0.01)

write_bundle(plan(Path(sys.argv[2])), Path(sys.argv[3]), progress=show)
"""


@pytest.mark.parametrize("lines", [1, 7, 15])
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path, lines: int) -> None:
    model = write_tiny_checkpoint(tmp_path / "model")
    whole = contents(write_bundle(plan(model), tmp_path / "whole").path)
    out = tmp_path / "bundle"
    process, output = started(SLOWLY, TESTS, model, out, env=environment())
    with process:
        for _ in range(lines):
            output.readline()
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()
    write_bundle(plan(model), out)
    assert whole == contents(out)


def test_two_runs_to_one_place_are_refused(tmp_path: Path) -> None:
    ready = plan(write_tiny_checkpoint(tmp_path / "model"))

    def again(*_: object) -> None:
        write_bundle(ready, tmp_path / "bundle")

    with pytest.raises(SettingError) as caught:
        write_bundle(ready, tmp_path / "bundle", progress=again)
    assert caught.value.subject == str(tmp_path / "bundle")
    assert caught.value.found == "another that is at it"


@pytest.mark.parametrize("jobs", [0, -1])
def test_a_number_of_jobs_that_is_not_positive_is_refused(
    tmp_path: Path, jobs: int
) -> None:
    ready = plan(write_tiny_checkpoint(tmp_path / "model"))
    with pytest.raises(SettingError, match="jobs: expected a positive number"):
        write_bundle(ready, tmp_path / "bundle", jobs=jobs)


def test_a_journal_gives_back_what_was_added(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal") as journal:
        journal.add("a", {"error": 0.1})
    with Journal(tmp_path / "journal") as journal:
        journal.add("b", {"error": None})
        assert dict(journal) == {"a": {"error": 0.1}, "b": {"error": None}}
    lines = (tmp_path / "journal").read_text().splitlines()
    assert [json.loads(line)[0] for line in lines] == ["a", "b"]
