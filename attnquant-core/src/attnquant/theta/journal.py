"""A journal: what is done of a long piece of work, in a file that survives a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Journal(Mapping[str, Mapping[str, Any]]):
    """Records by name, one JSON line each, appended and flushed as they come.

    A line that a crash has cut off is as if it had never been begun.

    Args:
        path: The file; what it holds already is read.
    """

    def __init__(self, path: Path) -> None:
        self._records: dict[str, Mapping[str, Any]] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        whole = 0
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            name, record = json.loads(line)
            self._records[name] = record
            whole += len(line)
        os.ftruncate(self._file, whole)
        os.lseek(self._file, whole, os.SEEK_SET)

    def add(self, name: str, record: Mapping[str, Any]) -> None:
        """Record that something is done, and wait until that is on the disk.

        Args:
            name: What is done.
            record: What is known of it, as JSON data.
        """
        line = memoryview((json.dumps([name, record]) + "\n").encode())
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)
        self._records[name] = record

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        """Return what was recorded."""
        return self._records[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over what is done, in order."""
        return iter(self._records)

    def __len__(self) -> int:
        """Count what is done."""
        return len(self._records)

    def __enter__(self) -> Self:
        """Give the journal itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        os.close(self._file)
