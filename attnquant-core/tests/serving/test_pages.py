"""Memory of mapped files is given back, and that of nothing else."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from max.dtype import DType
from max.graph.weights import load_weights
from safetensors.numpy import save_file

from attnquant.serving.arrays import cast, to_array
from attnquant.serving.pages import ReadOnlyFiles
from attnquant.theta.dtypes import BFLOAT16, Array

SIZE = 1 << 22


def mapped(path: Path, access: int = mmap.ACCESS_READ) -> Array:
    path.write_bytes(np.arange(SIZE, dtype=np.uint8).tobytes())
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=access), np.uint8)


def resident(path: Path) -> int:
    """Return how many bytes of a mapped file are resident in this process."""
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.endswith(str(path)):
            size = next(entry for entry in lines if entry.startswith("Rss:"))
            return 1024 * int(size.split()[1])
    raise AssertionError(path)


def test_a_file_is_given_back_and_can_still_be_read(tmp_path: Path) -> None:
    array = mapped(tmp_path / "file")
    expected = array.copy()
    assert resident(tmp_path / "file") == SIZE
    assert ReadOnlyFiles().release(array)
    assert resident(tmp_path / "file") == 0
    np.testing.assert_array_equal(array, expected)


def test_a_part_of_a_file_is_given_back_in_whole_pages(tmp_path: Path) -> None:
    array = mapped(tmp_path / "file")
    assert array.sum() > 0
    assert ReadOnlyFiles().release(array[100 : SIZE // 2 + 100])
    left = resident(tmp_path / "file")
    assert SIZE // 2 <= left <= SIZE // 2 + 2 * mmap.PAGESIZE


@pytest.mark.parametrize("access", [mmap.ACCESS_COPY, mmap.ACCESS_WRITE])
def test_what_could_be_written_is_left_alone(tmp_path: Path, access: int) -> None:
    array = mapped(tmp_path / "file", access)
    array[:] = 7
    assert not ReadOnlyFiles().release(array)
    assert (array == 7).all()


def test_memory_of_no_file_is_left_alone() -> None:
    array = np.full(SIZE, 7, np.uint8)
    assert not ReadOnlyFiles().release(array)
    assert (array == 7).all()


def test_less_than_a_page_is_left_alone(tmp_path: Path) -> None:
    assert not ReadOnlyFiles().release(mapped(tmp_path / "file")[1:100])


def test_where_the_system_does_not_tell_nothing_is_given_back(tmp_path: Path) -> None:
    files = ReadOnlyFiles(tmp_path / "none")
    assert not files.release(mapped(tmp_path / "file"))


def test_a_mapped_weight_is_cast_exactly_and_not_resident_twice(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, (3000, 2000), dtype=np.uint16)
    path = tmp_path / "model.safetensors"
    save_file({"w": bits.view(BFLOAT16)}, path)
    weight = load_weights([path]).w.data()
    wide = to_array(cast(weight, DType.float32))
    np.testing.assert_array_equal(
        wide.view(np.uint32), bits.astype(np.uint32) << np.uint32(16)
    )
    assert resident(path) < bits.nbytes / 10
