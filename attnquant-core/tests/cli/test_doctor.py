"""`attnquant doctor`: what is wrong is said with what mends it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnquant.cli import doctor
from attnquant.errors import ServingError
from core_support.plugins import install, supplying
from core_support.processes import Run, attnquant


def findings(run: Run, code: int) -> dict[str, dict[str, str]]:
    done = run("doctor", "--json", "--no-run")
    assert done.code == code, done.out
    return {item["check"]: item for item in json.loads(done.out)}


def test_a_sound_installation_passes_and_runs_something_on_max() -> None:
    done = attnquant("doctor", "--json")
    assert done.code == 0, done.out
    found = {item["check"]: item for item in json.loads(done.out)}
    assert list(found)[:2] == ["attnquant", "max"]
    for check in ("max", "metadata", "cpu", "compiler", "cache", "tiny run"):
        assert found[check]["verdict"] == "ok", found[check]
    assert found["plugin gemma3"]["verdict"] == "ok"
    assert found["gpu"]["verdict"] in {"ok", "note"}
    assert "from numpy's" in found["tiny run"]["text"]


def test_nothing_is_run_when_that_is_asked_for(run: Run, home: Path) -> None:
    install(home, "a", supplying("A"))
    assert "tiny run" not in findings(run, 0)


@pytest.mark.usefixtures("home")
def test_without_max_it_says_what_works_and_how_to_get_it(run: Run) -> None:
    # The fixture hides the folder that MAX is installed in.
    found = findings(run, 0)
    assert found["max"]["verdict"] == "note"
    assert "pip install" in found["max"]["remedy"]
    assert "No AttnQuant plugin is installed" in found["plugins"]["remedy"]
    assert "gpu" not in found


@pytest.mark.usefixtures("home")
def test_a_max_outside_the_tested_range_is_wrong(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "max_version", lambda: "25.1")
    found = findings(run, 1)
    assert found["max"]["verdict"] == "wrong"
    assert "25.1, and attnquant-core was tested with >=26.7" in found["max"]["text"]
    assert found["compiler"]["verdict"] == "wrong"


def test_a_broken_plugin_is_wrong_and_a_disabled_one_is_not(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(home, "a", "import no_such_package")
    install(home, "b", supplying("B"))
    monkeypatch.setenv("ATTNQUANT_DISABLE", "b")
    found = findings(run, 1)
    assert found["plugin a"]["verdict"] == "wrong"
    assert "no_such_package" in found["plugin a"]["remedy"]
    assert found["plugin b"]["verdict"] == "note"


def test_leftover_metadata_are_wrong_and_named_by_path(run: Run, home: Path) -> None:
    install(home, "a", supplying("A"))
    stale = home / "attnquant_a-0.1.dist-info"
    stale.mkdir()
    found = findings(run, 1)["metadata"]
    assert str(stale) in found["text"]
    assert found["remedy"] == f"rm -r {stale}"


@pytest.mark.usefixtures("home")
def test_a_cache_that_cannot_be_written_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert doctor._cache().verdict is doctor.Verdict.OK
    monkeypatch.setattr("os.access", lambda *_: False)
    found = doctor._cache()
    assert found.verdict is doctor.Verdict.WRONG
    assert str(tmp_path / "modular") in found.text


def test_a_full_disk_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    assert doctor._cache().verdict is doctor.Verdict.NOTE


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ServingError("a tiny projection on MAX", found="3"), "a tiny projection"),
        (OSError("libmax.so:\nno such file"), "OSError: libmax.so: no such file"),
    ],
)
def test_a_run_that_fails_is_wrong_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    def broken() -> float:
        raise error

    monkeypatch.setattr("attnquant.serving.self_check.run_tiny_projection", broken)
    found = doctor._guarded("tiny run", doctor._tiny_run)
    assert found.verdict is doctor.Verdict.WRONG
    assert text in found.text
    assert "\n" not in found.text


def test_the_table_ends_with_what_mends_things(run: Run, home: Path) -> None:
    install(home, "a", "raise ValueError('no luck')")
    done = run("doctor", "--no-run")
    assert done.code == 1
    header, *rest = done.out.splitlines()
    assert header.split() == ["check", "found"]
    assert any(line.startswith("wrong  plugin a") for line in rest)
    assert "plugin a: ValueError: no luck. Upgrade or reinstall attnquant-a." in rest
