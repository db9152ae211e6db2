"""Memory of mapped files, given back once their content has been copied.

A checkpoint is mapped, not read: what of it is touched is resident until the system
needs the memory, and counts as this process's. Where tensors are converted, source and
result would both be resident at the end.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from bisect import bisect_right
from pathlib import Path

from attnquant.theta.dtypes import Array

MAPS = Path("/proc/self/maps")


class ReadOnlyFiles:
    """Where in this process's memory files are mapped that cannot be written there."""

    def __init__(self, maps: Path = MAPS) -> None:
        """Read what Linux tells; elsewhere nothing is known, and nothing given back."""
        try:
            lines = maps.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            lines = ""
        self._ranges = sorted(_file_ranges(lines))

    def release(self, array: Array) -> bool:
        """Give the memory of an array back, if it is a read-only file's.

        The content stays what it is: the system reads it again if it is asked for.

        Args:
            array: C-contiguous; whole pages within it are given back.

        Returns:
            Whether that was done.
        """
        start = array.ctypes.data
        end = start + array.nbytes
        place = bisect_right(self._ranges, (start, sys.maxsize)) - 1
        if place < 0 or end > self._ranges[place][1]:
            return False
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length <= 0:
            return False
        address, size = ctypes.c_void_p(first), ctypes.c_size_t(length)
        return bool(_LIBC.madvise(address, size, mmap.MADV_DONTNEED) == 0)


_LIBC = ctypes.CDLL(None)


def _file_ranges(maps: str) -> list[tuple[int, int]]:
    ranges = []
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        # With a path; pages of what could be written may differ from the file's.
        if len(fields) == len(("range", "mode", "offset", "device", "inode", "path")):
            addresses, mode, _, _, inode, _ = fields
            if mode.startswith("r--") and inode != "0":
                start, _, end = addresses.partition("-")
                ranges.append((int(start, 16), int(end, 16)))
    return ranges
