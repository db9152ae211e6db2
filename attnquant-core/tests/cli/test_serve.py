"""`attnquant serve` and `generate`: the `max` command that they print and become."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnquant.cli import launching
from core_support.bundles import write_tiny_bundle
from core_support.processes import Run

ADDED = ["--custom-architectures", "attnquant"]
CPU = ["--devices", "cpu", "--quantization-encoding", "float32"]


@pytest.fixture
def bundle(tmp_path: Path, tiny_plugin: Path) -> Path:  # noqa: ARG001 (for its effect)
    return write_tiny_bundle(tmp_path).path


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a `max` beside the interpreter, and no GPU into the machine."""
    beside = tmp_path / "bin" / "max"
    beside.parent.mkdir()
    beside.write_text("#!/bin/sh\n")
    beside.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(beside.with_name("python")))
    monkeypatch.setattr(launching, "max_version", lambda: "26.7.0")
    monkeypatch.setattr(launching, "has_gpu", lambda: False)
    return beside


class BecameMaxError(Exception):
    """Stands for the program that would run from here on."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []

    def become(path: str, words: Sequence[str], environ: Mapping[str, str]) -> None:
        assert environ is os.environ
        found.append((path, list(words)))
        raise BecameMaxError

    monkeypatch.setattr(os, "execvpe", become)
    return found


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_the_command_that_is_printed_is_the_one_it_becomes(
    run: Run,
    bundle: Path,
    program: Path,
    became: list[tuple[str, list[str]]],
    command: str,
) -> None:
    flags = ["--prompt", "it's two words", "--port=80"]
    with pytest.raises(BecameMaxError):
        run(command, bundle, *flags)
    ((path, words),) = became
    printed = run(command, "--print-only", bundle, *flags)
    assert path == str(program)
    assert words == [
        *(str(program), command, "--model", str(bundle)),
        *(*ADDED, *CPU, *flags),
    ]
    assert (printed.code, printed.out) == (0, "")
    assert shlex.split(printed.err) == words


@pytest.mark.usefixtures("program")
def test_only_printing_starts_nothing(
    run: Run, bundle: Path, became: list[tuple[str, list[str]]]
) -> None:
    done = run("serve", "--print-only", bundle, "--port", "80")
    assert (done.code, done.out) == (0, "")
    assert done.err.endswith("--port 80\n")
    assert became == []


def added(*flags: str) -> list[str]:
    words = launching.max_command("max", "serve", Path("b"), flags)
    assert words[: 2 + 2] == ["max", "serve", "--model", "b"]
    assert words[len(words) - len(flags) :] == list(flags)
    return words[4 : len(words) - len(flags)]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], [*ADDED, *CPU]),
        (["--devices", "cpu"], [*ADDED, *CPU[2:]]),
        (["--devices=cpu"], [*ADDED, *CPU[2:]]),
        (["--devices", "gpu:0"], ADDED),
        (["--devices=gpu"], ADDED),
        (["--quantization-encoding", "bfloat16"], [*ADDED, *CPU[:2]]),
        (["--quantization-encoding=bfloat16"], [*ADDED, *CPU[:2]]),
        (["--custom-architectures", "attnquant"], CPU),
        (["--custom-architectures=attnquant"], CPU),
        # MAX takes several; the user's comes later and so wins.
        (["--custom-architectures", "mine"], [*ADDED, *CPU]),
        (["--config-file", "max.yaml"], ADDED),
        (["--config-file=max.yaml"], ADDED),
        # A value that looks like a flag's name, and other flags of that beginning.
        (["--prompt", "--devices cpu"], [*ADDED, *CPU]),
        (["--devices-of-mine", "x"], [*ADDED, *CPU]),
    ],
    ids=lambda value: shlex.join(value) or "nothing",
)
def test_what_the_user_sets_is_not_set_again(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], expected: list[str]
) -> None:
    monkeypatch.setattr(launching, "has_gpu", lambda: False)
    assert added(*flags) == expected


def test_with_a_gpu_device_and_encoding_are_left_to_max(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launching, "has_gpu", lambda: True)
    assert added() == ADDED
    assert added("--devices", "cpu") == [*ADDED, *CPU[2:]]


@given(st.lists(st.text(), max_size=6))
def test_flags_are_handed_on_as_they_are(flags: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "has_gpu", lambda: False)
        if any(flag.partition("=")[0] in launching.MODEL_FLAGS for flag in flags):
            return
        added(*flags)


@pytest.mark.parametrize(
    "flags", [["--model", "other"], ["--model=other"], ["--model-path", "other"]]
)
@pytest.mark.usefixtures("program")
def test_a_second_model_is_refused(run: Run, bundle: Path, flags: list[str]) -> None:
    done = run("serve", bundle, *flags)
    assert done.code == 1
    assert done.err.startswith(f"attnquant: error: {flags[0].partition('=')[0]}: ")
    assert f"the model is {bundle}" in done.err


@pytest.mark.usefixtures("program")
def test_a_directory_that_is_missing_or_none_is_refused(
    run: Run, tmp_path: Path, tiny_plugin: Path
) -> None:
    del tiny_plugin
    for path in (tmp_path / "nothing", tmp_path):
        done = run("serve", path)
        assert (done.code, done.err.count("\n")) == (1, 1)
        assert done.err.startswith(f"attnquant: error: {path}")


@pytest.mark.usefixtures("program")
def test_a_damaged_bundle_is_refused(run: Run, bundle: Path) -> None:
    (shard,) = bundle.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    done = run("generate", bundle)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert shard.name in done.err


@pytest.mark.usefixtures("program")
def test_an_architecture_without_a_plugin_is_refused(
    run: Run, tmp_path: Path, home: Path
) -> None:
    del home
    done = run("serve", write_tiny_bundle(tmp_path).path)
    assert done.code == 1
    assert done.err.startswith("attnquant: error: TinyForCausalLM: ")


@pytest.mark.usefixtures("program")
def test_a_variable_that_contradicts_the_bundle_is_refused(
    run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNQUANT_BLOCKS", "3")
    done = run("serve", bundle)
    assert done.code == 1
    assert done.err.startswith("attnquant: error: ATTNQUANT_BLOCKS: expected 2")


def test_without_max_it_says_what_to_install(
    run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "")
    done = run("serve", bundle)
    assert done.code == 1
    assert done.err.startswith("attnquant: error: MAX: expected the `max` command")
    assert 'pip install "attnquant-core[serving]"' in done.err
