"""`attnquant new-model`: what it writes installs, is lint-free and passes the kit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnquant.cli.main import main
from attnquant.cli.scaffold import MARK, SOURCES, NewModel, write_package

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
LLAMA = ROOT / "tests-integration" / "thirdparty" / "attnquant-llama"


def run(*command: str | Path, cwd: Path, path: str = "") -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        # As Python has it; and mypy must not find the packages of this repository.
        env=os.environ | {"PYTHONPATH": path, "MYPYPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_a_new_package_is_lint_free_and_keeps_the_structural_part(
    tmp_path: Path, source: str
) -> None:
    project = tmp_path / "project"
    new = NewModel("wild_zebra", "WildZebraForCausalLM", source)
    write_package(new, project)
    for command in (["check", "."], ["format", "--check", "."]):
        run(BIN / "ruff", *command, "--no-cache", cwd=project)
    run(BIN / "mypy", "--cache-dir", tmp_path / "mypy", cwd=project)
    site = tmp_path / "site"
    run(
        *(BIN / "uv", "pip", "install", "--quiet", "--no-deps", "--target", site),
        *("--python", sys.executable, project),
        cwd=tmp_path,
    )
    out = run(
        *(BIN / "attnquant", "check", "wild_zebra", "--parts", "structural"),
        *("--tests", project / "tests"),
        cwd=tmp_path,
        path=str(site),
    )
    assert "wild_zebra keeps all" in out


@pytest.mark.parametrize("source", SOURCES)
def test_every_place_that_needs_a_decision_says_what_to_decide(
    tmp_path: Path, source: str
) -> None:
    project = tmp_path / "project"
    write_package(NewModel("zebra", "ZebraForCausalLM", source), project)
    marks = [
        line.strip()
        for file in project.rglob("*.py")
        for line in file.read_text().splitlines()
        if MARK in line
    ]
    assert len(marks) >= 13
    assert all(len(mark) > len(MARK) + 20 for mark in marks)
    # Nothing of what it was made from is left in a name that Python or pip looks up.
    for file in project.rglob("*.py"):
        text = file.read_text()
        assert "@" + "NAME" not in text
        assert f"attnquant_{source}" not in text
        assert f"{source}_attnquant" not in text


def test_the_llama_package_is_the_plain_frame_with_its_decisions_taken(
    tmp_path: Path,
) -> None:
    frame = tmp_path / "frame"
    write_package(NewModel("llama", "LlamaForCausalLM", "plain"), frame)
    decided = {"arch.py"}
    for file in sorted((frame / "src").rglob("*.py")):
        if file.name in decided:
            continue
        unmarked = [line for line in file.read_text().splitlines() if MARK not in line]
        theirs = LLAMA / file.relative_to(frame)
        assert theirs.read_text().splitlines() == unmarked, file.name


# --- the command -------------------------------------------------------------------


def test_the_command_says_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-model", "wild_zebra"]) == 0
    out = capsys.readouterr().out
    assert "attnquant check wild_zebra --parts structural" in out
    metadata = (tmp_path / "attnquant-wild-zebra" / "pyproject.toml").read_text()
    assert 'name = "attnquant-wild-zebra"' in metadata
    assert 'wild_zebra = "attnquant_wild_zebra.plugin"' in metadata


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["Zebra"], "NAME: expected lower-case letters"),
        (["ze-bra"], "NAME: expected"),
        (["zebra", "--architecture", "1x"], "--architecture: expected the name of a"),
        (["zebra", "--out", "."], "--out: expected a folder that does not exist"),
    ],
)
def test_names_and_folders_that_will_not_do_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-model", *arguments]) == 1
    assert told in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_source_that_is_not_installed_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnquant.cli.scaffold.find_spec", lambda _: None)
    out = tmp_path / "x"
    assert main(["new-model", "zebra", "--from", "gemma3", "--out", str(out)]) == 1
    assert "pip install attnquant-gemma3" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
