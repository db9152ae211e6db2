"""The texts that ship: disjoint, always the same, and found in an installed wheel."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest

from attnquant import texts
from attnquant.errors import SettingError
from core_support.processes import python

CALIBRATION = texts.calibration_text()
HELD_OUT, LICENCE = texts.held_out_texts()
ALL = (CALIBRATION, HELD_OUT, LICENCE)


def paragraphs(text: str) -> set[str]:
    """Return paragraphs with line breaks and indents levelled."""
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip():
            blocks[-1].extend(line.split())
        else:
            blocks.append([])
    return {" ".join(block) for block in blocks if block}


def test_no_paragraph_is_both_calibrated_with_and_held_out() -> None:
    held_out = paragraphs(HELD_OUT.content)
    assert held_out
    assert not held_out & paragraphs(CALIBRATION.content)
    assert not paragraphs(LICENCE.content) & paragraphs(CALIBRATION.content)


def test_no_paragraph_of_the_standard_library_is_lost() -> None:
    from pydoc_data.topics import topics

    every = set().union(*map(paragraphs, topics.values()))
    kept = paragraphs(CALIBRATION.content) | paragraphs(HELD_OUT.content)
    assert kept == every


@pytest.mark.parametrize("text", [CALIBRATION, HELD_OUT], ids=lambda text: text.name)
def test_every_paragraph_stands_once(text: texts.Text) -> None:
    blocks = [" ".join(block.split()) for block in text.content.split("\n\n")]
    distinct = [block for block in blocks if block]
    assert len(distinct) == len(set(distinct))


def test_calibration_has_most_of_the_text_and_enough_is_held_out() -> None:
    assert len(CALIBRATION.content) > 5 * len(HELD_OUT.content)
    assert len(HELD_OUT.content) > 30_000
    assert len(LICENCE.content) > 10_000


@pytest.mark.parametrize("text", ALL, ids=lambda text: text.name)
def test_the_hash_is_of_the_text_in_utf8(text: texts.Text) -> None:
    assert hashlib.sha256(text.content.encode()).hexdigest() == text.sha256


def test_another_process_finds_the_same_texts() -> None:
    code = (
        "from attnquant import texts\n"
        "for text in (texts.calibration_text(), *texts.held_out_texts()):\n"
        "    print(text.name, text.sha256)"
    )
    done = python(code)
    assert done.stdout.splitlines() == [f"{text.name} {text.sha256}" for text in ALL]


def test_the_licence_is_that_of_the_installed_package() -> None:
    assert "Apache License" in LICENCE.content
    files = importlib.metadata.files("attnquant-core") or []
    assert [file for file in files if str(file).endswith("licenses/LICENSE")]


class Bare:
    """A distribution without any file."""

    def read_text(self, _: str) -> None:
        return None


def bare(_: str) -> Bare:
    return Bare()


def absent(name: str) -> None:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize("distribution", [bare, absent])
def test_a_package_without_its_licence(
    monkeypatch: pytest.MonkeyPatch, distribution: Callable[[str], object]
) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    with pytest.raises(SettingError, match="apache-licence: expected licenses/LICENSE"):
        texts.licence_text()


def test_a_file_is_read_under_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("Grüße.\n", encoding="utf-8")
    text = texts.read_text(tmp_path / "mine.txt")
    assert text == texts.Text("mine.txt", "Grüße.\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "expected a text file in UTF-8, found .*No such file"),
        (b"\xff\xfe", "expected a text file in UTF-8, found .*utf-8"),
        (b" \n\t", "expected a text, found an empty file"),
    ],
    ids=["absent", "not UTF-8", "blank"],
)
def test_a_file_that_is_no_text(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingError, match=message) as caught:
        texts.read_text(path)
    assert caught.value.subject == str(path)
