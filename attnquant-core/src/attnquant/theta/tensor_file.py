"""A safetensors file written tensor by tensor, so that one at most is in memory.

`safetensors.numpy.save_file` wants all tensors of a file at once. Here the header is
written first, from names, dtypes and shapes alone; the tensors follow in any order,
each to the place that the header gives it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from attnquant.theta.dtypes import Array, safetensors_code

TensorSpec = tuple[np.dtype[Any], tuple[int, ...]]
"""A tensor's dtype and shape."""

_ALIGNMENT = 8
"""The header is padded so that data begins at a multiple of this."""


def spec_bytes(spec: TensorSpec) -> int:
    """Return the size of a tensor in bytes."""
    dtype, shape = spec
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


class TensorFile:
    """A safetensors file of known contents, open for writing them.

    Args:
        path: The file. If it exists and has the size and header that follow from
            the other arguments, what is in it is kept: a writer may come back to it.
        specs: Dtype and shape of each tensor.
        metadata: What the file says of itself.

    Raises:
        OSError: If the file cannot be written, or the disk has too little room.
    """

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, TensorSpec],
        metadata: Mapping[str, str],
    ) -> None:
        self._specs = dict(specs)
        self._offsets, header = _header(specs, metadata)
        size = len(header) + sum(spec_bytes(spec) for spec in specs.values())
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._prepare(header, size)
        except BaseException:
            os.close(self._file)
            raise

    def _prepare(self, header: bytes, size: int) -> None:
        same_size = os.fstat(self._file).st_size == size
        if same_size and os.pread(self._file, len(header), 0) == header:
            return
        os.ftruncate(self._file, 0)
        if sys.platform == "linux":
            # Room for all of it now, so that a full disk shows before hours of work.
            os.posix_fallocate(self._file, 0, size)
        else:
            os.ftruncate(self._file, size)
        _write_at(self._file, header, 0)

    def write(self, name: str, array: Array, row: int = 0) -> None:
        """Write one tensor, or some of its rows.

        Args:
            name: The tensor's.
            array: All of it, or rows from `row` on.
            row: The first row.

        Raises:
            KeyError: If the file is to hold no tensor of that name.
            ValueError: If dtype or shape are not those announced.
            OSError: If it cannot be written.
        """
        dtype, shape = self._specs[name]
        fits = array.shape == shape and row == 0
        if array.ndim and array.shape[1:] == shape[1:]:
            fits = 0 <= row <= row + len(array) <= shape[0]
        if array.dtype != dtype or not fits:
            msg = f"{name}: {array.dtype} {array.shape} at {row}, not {dtype} {shape}"
            raise ValueError(msg)
        # As bytes, since numpy exports no buffer of bfloat16.
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        stride = spec_bytes((dtype, shape[1:])) if row else 0
        _write_at(self._file, data.data, self._offsets[name] + row * stride)

    def flush(self) -> None:
        """Wait until what was written is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        """Give the file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Flush if all went well, and close."""
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()


def _header(
    specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> tuple[dict[str, int], bytes]:
    # Wide dtypes first: then every tensor is aligned to its own item size.
    names = sorted(specs, key=lambda name: (-specs[name][0].itemsize, name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, start = {}, 0
    for name in names:
        dtype, shape = specs[name]
        end = start + spec_bytes(specs[name])
        starts[name] = start
        entries[name] = {
            "dtype": safetensors_code(dtype),
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return {name: len(header) + start for name, start in starts.items()}, header


def _write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, offset)
        rest, offset = rest[written:], offset + written
