"""Memory of mapped files: whose it is, and given back once its content was copied.

A checkpoint is mapped, not read: what of it is touched is resident until the system
needs the memory, and counts as this process's. Where tensors are converted, source and
result would both be resident at the end.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from operator import itemgetter
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

    def path_of(self, array: Array) -> str | None:
        """Return the path of the file that an array is mapped from.

        The path is Linux's: of a file that is gone it ends in `` (deleted)``.

        Args:
            array: C-contiguous.

        Returns:
            None if it is in no such file's memory.
        """
        start = array.ctypes.data
        place = bisect_right(self._ranges, start, key=itemgetter(0)) - 1
        if place < 0 or start + array.nbytes > self._ranges[place][1]:
            return None
        return self._ranges[place][2]

    def release(self, array: Array) -> bool:
        """Give the memory of an array back, if it is a read-only file's.

        The content stays what it is: the system reads it again if it is asked for.

        Args:
            array: C-contiguous; whole pages within it are given back.

        Returns:
            Whether that was done.
        """
        if self.path_of(array) is None:
            return False
        start = array.ctypes.data
        end = start + array.nbytes
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length <= 0:
            return False
        address, size = ctypes.c_void_p(first), ctypes.c_size_t(length)
        return bool(_LIBC.madvise(address, size, mmap.MADV_DONTNEED) == 0)


_LIBC = ctypes.CDLL(None)


def _file_ranges(maps: str) -> list[tuple[int, int, str]]:
    ranges = []
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        # With a path; pages of what could be written may differ from the file's.
        if len(fields) == len(("range", "mode", "offset", "device", "inode", "path")):
            addresses, mode, _, _, inode, path = fields
            if mode.startswith("r--") and inode != "0":
                start, _, end = addresses.partition("-")
                ranges.append((int(start, 16), int(end, 16), path))
    return ranges
