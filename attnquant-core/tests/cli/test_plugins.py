"""`attnquant plugins`: what was found, in which state, and why."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from core_support.plugins import install, supplying
from core_support.processes import Run


def test_a_loaded_plugin_is_listed(run: Run, home: Path) -> None:
    install(home, "a", supplying("A", "B"), distribution="maker-a", version="2.3")
    done = run("plugins")
    assert (done.code, done.err) == (0, "")
    header, row = done.out.splitlines()
    assert header == "plugin  architectures  distribution  state   load"
    assert re.fullmatch(r"a       A, B           maker-a 2.3   loaded  \d+\.\d ms", row)


def test_the_json_holds_every_plugin(run: Run, home: Path) -> None:
    install(home, "a", supplying("A"), version="2.3")
    install(home, "b", "import no_such_package")
    done = run("plugins", "--json")
    loaded, missing = json.loads(done.out)
    assert loaded.pop("load_ms") > 0
    assert loaded == {
        "name": "a",
        "distribution": "attnquant-a",
        "version": "2.3",
        "entry_point": "fake_a",
        "state": "loaded",
        "reason": "",
        "architectures": ["A"],
    }
    assert missing["state"] == "missing dependency"
    assert "no_such_package" in missing["reason"]
    assert (done.code, done.err) == (1, "")


@pytest.mark.usefixtures("home")
def test_no_plugin_at_all_is_said_in_full(run: Run) -> None:
    done = run("plugins")
    assert done.code == 0
    assert done.out.startswith("No AttnQuant plugin is installed")


@pytest.mark.usefixtures("home")
def test_no_plugin_at_all_is_an_empty_list_in_json(run: Run) -> None:
    assert json.loads(run("plugins", "--json").out) == []


@pytest.mark.parametrize(
    ("source", "state"),
    [
        ("raise ValueError('one\\ntwo')", "failed"),
        ("import no_such_package", "missing dependency"),
        (supplying("A", api_version=2), "incompatible"),
        (supplying("A") + "\n@hookimpl\ndef attnquant_prefix_map(x): ...", "failed"),
    ],
)
def test_trouble_is_explained_in_one_line_and_exits_with_1(
    run: Run, home: Path, source: str, state: str
) -> None:
    install(home, "a", source)
    done = run("plugins")
    assert (done.code, done.err) == (1, "")
    _header, row, reason = done.out.splitlines()
    assert row.partition("attnquant-a 1.0")[2].strip().startswith(state)
    assert reason.startswith("a: ")


def test_a_disabled_plugin_is_no_trouble(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(home, "a", supplying("A"))
    monkeypatch.setenv("ATTNQUANT_DISABLE", "a")
    done = run("plugins")
    assert done.code == 0
    assert done.out.splitlines()[1:] == [
        "a       unknown        attnquant-a 1.0  disabled  0.0 ms",
        "a: named in ATTNQUANT_DISABLE.",
    ]


def test_a_conflict_is_trouble(run: Run, home: Path) -> None:
    install(home, "a", supplying("X"))
    install(home, "b", supplying("X"))
    assert run("plugins").code == 1


def test_a_settled_conflict_is_no_trouble(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(home, "a", supplying("X"))
    install(home, "b", supplying("X"))
    monkeypatch.setenv("ATTNQUANT_PIN", "X=attnquant-b")
    done = run("plugins")
    assert done.code == 0
    assert [line.split()[-3] for line in done.out.splitlines()[1:3]] == [
        "disabled",
        "loaded",
    ]


@pytest.mark.usefixtures("home")
def test_a_malformed_variable_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNQUANT_PIN", "x")
    assert run("plugins").error().startswith("ATTNQUANT_PIN: expected ")


def test_what_a_plugin_prints_stays_out_of_the_answer(run: Run, home: Path) -> None:
    install(home, "a", "print('hello')" + supplying("A"))
    done = run("plugins", "--json")
    assert [item["state"] for item in json.loads(done.out)] == ["loaded"]
    assert done.err == "hello\n"


def test_an_allowed_plugin_that_is_not_installed_is_trouble(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(home, "a", supplying("A"))
    monkeypatch.setenv("ATTNQUANT_PLUGINS", "a,aa")
    done = run("plugins")
    assert done.code == 1
    assert "aa: named in ATTNQUANT_PLUGINS, but no installed distribution" in done.out


def test_metadata_that_should_not_be_there_are_named(run: Run, home: Path) -> None:
    install(home, "a", supplying("A"))
    (home / "attnquant_a-0.9.dist-info").mkdir()
    done = run("plugins")
    assert done.code == 0
    assert str(home / "attnquant_a-0.9.dist-info") in done.err
