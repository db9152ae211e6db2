"""Files that weights are mapped from are watched, and only writing to them counts."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from attnquant.serving.pages import ReadOnlyFiles
from attnquant.serving.watch import FileWatch, end_with_files
from attnquant.theta.dtypes import Array

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(CONTENT)
    # Its time is some while ago, as a bundle's is.
    os.utime(path, (1e9, 1e9))
    return path


@pytest.fixture
def watch(path: Path) -> Iterator[FileWatch]:
    watch = FileWatch([str(path)])
    yield watch
    watch.close()


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"x")


def overwrite_mapped(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        content[1000] = 0


def truncate(path: Path) -> None:
    os.truncate(path, len(CONTENT) // 2)


def write_anew(path: Path) -> None:
    path.write_bytes(CONTENT)


@pytest.mark.parametrize(
    "write",
    [overwrite, overwrite_mapped, truncate, write_anew],
    ids=lambda f: f.__name__,
)
def test_whatever_writes_to_a_file_is_noticed(
    watch: FileWatch, path: Path, write: Callable[[Path], None]
) -> None:
    assert watch.changed() is None
    write(path)
    assert watch.changed() == str(path)


def read(path: Path) -> None:
    assert path.read_bytes() == CONTENT


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"other")
    other.replace(path)


def permit(path: Path) -> None:
    path.chmod(0o600)


@pytest.mark.parametrize(
    "harmless", [read, replace, permit, Path.unlink], ids=lambda f: f.__name__
)
def test_what_leaves_the_mapped_file_as_it_is_is_no_change(
    watch: FileWatch, path: Path, harmless: Callable[[Path], None]
) -> None:
    harmless(path)
    assert watch.changed() is None


def test_a_file_that_is_gone_is_not_watched(tmp_path: Path) -> None:
    assert FileWatch([str(tmp_path / "none")]).changed() is None


def mapped(path: Path) -> Array:
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(content, np.uint8)


def test_the_file_of_an_array_is_known(path: Path) -> None:
    whole = mapped(path)
    maps = ReadOnlyFiles()
    assert maps.path_of(whole) == maps.path_of(whole[100:200]) == str(path)
    assert maps.path_of(whole.copy()) is None


def test_only_a_worker_of_a_server_watches(path: Path) -> None:
    assert end_with_files([mapped(path)]) is None
