"""Metadata: the best of a name is taken, and what should not be there is reported."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnquant.distributions import find_installed
from attnquant.plugins import State, find_plugins
from core_support.plugins import install, supplying


def metadata(path: Path, name: str, version: str) -> None:
    file = path / ("PKG-INFO" if path.suffix == ".egg-info" else "METADATA")
    path.mkdir(exist_ok=True)
    file.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def points(path: Path, text: str) -> None:
    (path / "entry_points.txt").write_text(text)


def only_problem() -> tuple[str, str, str]:
    (problem,) = find_plugins({}).problems
    return problem.path, problem.text, problem.remedy


@pytest.fixture
def loaded(home: Path) -> Path:
    """Install a plugin that must stay loaded whatever lies beside it."""
    install(home, "m", supplying("M"))
    return home


@pytest.fixture(autouse=True)
def _still_loaded(loaded: Path) -> Iterator[None]:
    yield
    assert loaded.is_dir()
    found = {plugin.name: plugin for plugin in find_plugins({}).plugins}
    assert found["m"].state is State.LOADED
    assert (found["m"].distribution, found["m"].version) == ("attnquant-m", "1.0")
    assert set(found) <= {"m", "attnquant-n"}


def test_sound_metadata_are_no_problem(loaded: Path) -> None:
    assert find_installed().problems == ()
    assert any(loaded.iterdir())


@pytest.mark.parametrize("version", ["0.9", "1.0.1", "2.0"])
def test_an_empty_dist_info_does_not_hide_the_whole_one(
    loaded: Path, version: str
) -> None:
    path = loaded / f"attnquant_m-{version}.dist-info"
    path.mkdir()
    where, text, remedy = only_problem()
    assert where == str(path)
    assert "without a name or a version" in text
    assert remedy == f"rm -r {path}"


def test_an_empty_dist_info_of_what_is_gone_is_reported(loaded: Path) -> None:
    path = loaded / "attnquant_gone-1.0.dist-info"
    path.mkdir()
    assert only_problem()[0] == str(path)


def test_a_stale_egg_info_does_not_win(loaded: Path) -> None:
    path = loaded / "attnquant_m.egg-info"
    metadata(path, "attnquant-m", "0.1")
    points(path, "[attnquant.models]\nm = module_of_long_ago\n")
    where, text, remedy = only_problem()
    assert where == str(path)
    assert "a stale egg-info of attnquant-m (0.1)" in text
    assert remedy == f"rm -r {path}"


def test_a_second_installation_is_named_with_both_paths(
    loaded: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(loaded, elsewhere)
    (elsewhere / "attnquant_m-1.0.dist-info").rename(
        elsewhere / "Attnquant.M-0.5.dist-info"
    )
    metadata(elsewhere / "Attnquant.M-0.5.dist-info", "Attnquant.M", "0.5")
    # After ours: what comes first on the path is also what is imported.
    # The list is that of the fixture, which puts the old one back.
    sys.path.append(str(elsewhere))
    where, text, _ = only_problem()
    assert where == str(elsewhere / "Attnquant.M-0.5.dist-info")
    assert f"beside {loaded / 'attnquant_m-1.0.dist-info'} (1.0)" in text


def test_a_folder_that_is_twice_on_the_path_is_no_second_installation(
    loaded: Path,
) -> None:
    sys.path.append(str(loaded))
    assert find_installed().problems == ()


@pytest.mark.parametrize(
    "content",
    [
        b"[attnquant.models]\nno equals sign\n",
        b"[attnquant.models]\nx = \xff\n",
        b"[attnquant.models]\nn = no module!\n",
    ],
)
def test_entry_points_that_cannot_be_read_are_reported(
    loaded: Path, content: bytes
) -> None:
    path = loaded / "attnquant_n-1.0.dist-info"
    metadata(path, "attnquant-n", "1.0")
    (path / "entry_points.txt").write_bytes(content)
    assert only_problem()[0] == str(path)
    lost = next(p for p in find_plugins({}).plugins if p.name == "attnquant-n")
    assert lost.state is State.FAILED
    assert "metadata that cannot be read" in lost.reason
    assert f"Reinstall attnquant-n, or remove what is left of it: rm -r {path}" in (
        lost.reason
    )


def test_metadata_that_are_a_file_are_reported(loaded: Path) -> None:
    path = loaded / "attnquant_n.egg-info"
    path.write_text("Name: attnquant-n\n")
    assert only_problem()[0] == str(path)


def test_broken_metadata_of_others_are_not_our_affair(loaded: Path) -> None:
    (loaded / "somebody-1.0.dist-info").mkdir()
    (loaded / "other-1.0.dist-info").mkdir()
    (loaded / "other-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe")
    assert find_installed().problems == ()
