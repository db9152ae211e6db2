"""A safetensors file written tensor by tensor is one like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from attnquant.theta.tensor_file import TensorFile, TensorSpec
from core_support.tiny import assert_same_bits, finite_bfloat16

ARRAYS = {
    "a": np.arange(3, dtype=np.int8),
    "b.wide": np.arange(6, dtype=np.float64).reshape(2, 3) / 7,
    "c": finite_bfloat16(),
    "scalar": np.asarray(2.5, np.float32),
    "empty": np.zeros((0, 4), np.float16),
}
SPECS: dict[str, TensorSpec] = {n: (a.dtype, a.shape) for n, a in ARRAYS.items()}


def write(path: Path, names: list[str], metadata: dict[str, str] | None = None) -> None:
    with TensorFile(path, SPECS, metadata or {}) as file:
        for name in names:
            file.write(name, ARRAYS[name])


@pytest.mark.parametrize("names", [sorted(ARRAYS), sorted(ARRAYS, reverse=True)])
def test_safetensors_reads_what_was_written_in_any_order(
    tmp_path: Path, names: list[str]
) -> None:
    write(tmp_path / "x", names, {"format": "pt"})
    assert_same_bits(ARRAYS, load_file(tmp_path / "x"))
    with safe_open(tmp_path / "x", framework="np") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_strided_array_is_written_by_its_values(tmp_path: Path) -> None:
    array = np.arange(12.0).reshape(3, 4).T
    with TensorFile(tmp_path / "x", {"t": (array.dtype, array.shape)}, {}) as file:
        file.write("t", array)
    np.testing.assert_array_equal(load_file(tmp_path / "x")["t"], array)


def test_a_writer_that_comes_back_finds_what_it_wrote(tmp_path: Path) -> None:
    names = sorted(ARRAYS)
    write(tmp_path / "x", names[:2])
    write(tmp_path / "x", names[2:])
    assert_same_bits(ARRAYS, load_file(tmp_path / "x"))


def test_a_file_of_other_contents_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"something else" * 10000)
    write(tmp_path / "x", sorted(ARRAYS))
    write(tmp_path / "y", sorted(ARRAYS))
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_data_is_aligned_to_its_item_size(tmp_path: Path) -> None:
    write(tmp_path / "x", sorted(ARRAYS))
    raw = (tmp_path / "x").read_bytes()
    for array in ARRAYS.values():
        if array.size:
            assert raw.index(array.tobytes()) % array.itemsize == 0


@pytest.mark.parametrize(
    "array", [np.zeros(3, np.int16), np.zeros(4, np.int8), np.zeros((3, 1), np.int8)]
)
def test_an_array_unlike_its_announcement_is_refused(
    tmp_path: Path, array: np.ndarray
) -> None:
    with (
        TensorFile(tmp_path / "x", SPECS, {}) as file,
        pytest.raises(ValueError, match="a: "),
    ):
        file.write("a", array)
