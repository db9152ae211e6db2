"""Plugins that claim the same architecture, and how `find` explains itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnquant.errors import ArchitectureError
from attnquant.plugins import Plugin, State, find_plugins
from core_support.plugins import install, supplying


def by_name(environ: dict[str, str] | None = None) -> dict[str, Plugin]:
    return {plugin.name: plugin for plugin in find_plugins(environ or {}).plugins}


@pytest.fixture
def rivals(home: Path) -> Path:
    install(home, "a", supplying("X"), distribution="maker-a")
    install(home, "b", supplying("X"), distribution="maker-b")
    return home


@pytest.mark.usefixtures("rivals")
def test_two_claims_on_an_architecture_are_a_conflict() -> None:
    for plugin in by_name().values():
        assert plugin.state is State.CONFLICT
        assert "maker-a (a) and maker-b (b) both claim X" in plugin.reason
        assert "ATTNQUANT_PIN=X=<distribution>" in plugin.reason
    assert find_plugins({}).supplied == {}


def test_neither_side_of_a_conflict_stops_others(rivals: Path) -> None:
    install(rivals, "c", supplying("C"))
    assert list(find_plugins({}).supplied) == ["C"]


@pytest.mark.usefixtures("rivals")
@pytest.mark.parametrize("pinned", ["maker-b", "Maker_B", "maker.b"])
def test_a_pin_settles_a_conflict(pinned: str) -> None:
    environ = {"ATTNQUANT_PIN": f"X={pinned}"}
    found = by_name(environ)
    assert find_plugins(environ).find("X").plugin.name == "b"
    assert found["b"].state is State.LOADED
    assert found["a"].state is State.DISABLED
    assert f"ATTNQUANT_PIN=X={pinned}" in found["a"].reason


@pytest.mark.usefixtures("rivals")
@pytest.mark.parametrize("pin", ["X=maker-c", "Y=maker-a"])
def test_a_pin_of_something_else_settles_nothing(pin: str) -> None:
    found = by_name({"ATTNQUANT_PIN": pin})
    assert {State.CONFLICT} == {plugin.state for plugin in found.values()}
    assert ("decides nothing" in found["a"].reason) == pin.startswith("X=")


def test_a_pin_without_a_conflict_changes_nothing(home: Path) -> None:
    install(home, "a", supplying("X"), distribution="maker-a")
    assert by_name({"ATTNQUANT_PIN": "X=maker-b"})["a"].state is State.LOADED


@pytest.mark.usefixtures("rivals")
@pytest.mark.parametrize("name", ["ATTNQUANT_DISABLE", "ATTNQUANT_PLUGINS"])
def test_disabling_one_side_settles_a_conflict(name: str) -> None:
    environ = {name: "b"}
    expected = "a" if name == "ATTNQUANT_DISABLE" else "b"
    assert find_plugins(environ).find("X").plugin.name == expected


@pytest.mark.parametrize("broken", ["raise ValueError", supplying("X", api_version=2)])
def test_a_plugin_that_is_not_loaded_claims_nothing(home: Path, broken: str) -> None:
    install(home, "a", supplying("X"))
    install(home, "b", broken)
    assert find_plugins({}).find("X").plugin.name == "a"


def test_three_claims_name_all_three(home: Path) -> None:
    for name in "abc":
        install(home, name, supplying("X"))
    reason = by_name()["b"].reason
    assert "attnquant-a (a) and attnquant-b (b) and attnquant-c (c)" in reason


def test_two_plugins_of_one_distribution_conflict_as_well(home: Path) -> None:
    install(home, "a", supplying("X"), distribution="maker")
    points = next(home.glob("maker-*")) / "entry_points.txt"
    points.write_text("[attnquant.models]\na = fake_a\nb = fake_b\n")
    (home / "fake_b.py").write_text(supplying("X"))
    states = {plugin.state for plugin in by_name().values()}
    assert {State.CONFLICT} == states


def unavailable(environ: dict[str, str] | None = None) -> ArchitectureError:
    with pytest.raises(ArchitectureError) as caught:
        find_plugins(environ or {}).find("X")
    error = caught.value
    assert error.subject == "X"
    assert "\n" not in str(error)
    return error


def test_with_no_plugin_installed_it_says_what_to_install(home: Path) -> None:
    assert not any(home.iterdir())
    error = unavailable()
    assert error.expected == "one of none (no plugin)"
    assert "No AttnQuant plugin is installed" in error.hint
    assert "pip install" in error.hint


@pytest.mark.parametrize(
    ("source", "state"),
    [
        ("raise ValueError('a\\nb')", "failed: ValueError: a b."),
        ("import no_such_package", "missing dependency: No module named"),
        (supplying("X", api_version=2), "incompatible: written for plugin API 2"),
        (
            supplying("X") + "\n@hookimpl\ndef attnquant_x(): ...",
            "failed: plugin a, hook attnquant_x: expected one of",
        ),
    ],
)
def test_it_says_why_a_plugin_is_not_there(home: Path, source: str, state: str) -> None:
    install(home, "a", source, version="2.3")
    assert f"Plugin a (attnquant-a 2.3) is {state}" in unavailable().hint


def test_it_says_that_a_plugin_is_disabled(home: Path) -> None:
    install(home, "a", supplying("X"))
    hint = unavailable({"ATTNQUANT_DISABLE": "a"}).hint
    assert hint == (
        "Plugin a (attnquant-a 1.0) is disabled: named in ATTNQUANT_DISABLE."
    )


@pytest.mark.usefixtures("rivals")
def test_it_says_that_plugins_are_in_conflict() -> None:
    assert unavailable().hint.count("both claim X") == 2


def test_it_says_so_for_every_plugin(home: Path) -> None:
    install(home, "a", "raise ValueError")
    install(home, "b", "import no_such_package")
    install(home, "c", supplying("C"))
    error = unavailable()
    assert error.expected == "one of C"
    assert "Plugin a" in error.hint
    assert "Plugin b" in error.hint
    assert "Plugin c" not in error.hint


def test_an_architecture_that_nobody_supplies_is_named(home: Path) -> None:
    install(home, "a", supplying("A", "B"))
    with pytest.raises(ArchitectureError) as caught:
        find_plugins({}).find("C")
    assert caught.value.subject == "C"
    assert caught.value.expected == "one of A, B"
    assert "Every installed plugin is loaded" in caught.value.hint
