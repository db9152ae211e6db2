"""A serving worker ends when the file of its weights is written to.

On a CPU, weights of the dtype that is served are not read but mapped. A bundle that is
deleted, or replaced by another of its name, stays as it was for who has it mapped. One
that is written to in place (`cp` onto it, `rsync --inplace`) does not: every answer
from then on would be wrong, and nobody would know.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from typing import NoReturn

from attnquant.orphans import is_worker
from attnquant.serving.pages import ReadOnlyFiles
from attnquant.theta.dtypes import Array

SECONDS = 1.0
"""How often files are looked at."""

# Below MAX's own name, since MAX's console shows no other.
logger = logging.getLogger("max.pipelines.attnquant")


class FileWatch:
    """Files, held open so that they are these whatever their names come to mean."""

    def __init__(self, paths: Iterable[str]) -> None:
        """Note size and time of each; those that are gone cannot be written to."""
        self._files: dict[str, int] = {}
        for path in sorted(set(paths)):
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
        self._noted = {path: _state(file) for path, file in self._files.items()}

    def changed(self) -> str | None:
        """Return the first file that was written to since; None as a rule."""
        for path, file in self._files.items():
            if _state(file) != self._noted[path]:
                return path
        return None

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def _state(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns


def end_with_files(arrays: Iterable[Array]) -> threading.Thread | None:
    """In MAX's worker, end it once a file that arrays are mapped from is written to.

    Args:
        arrays: C-contiguous, of any shape and dtype.

    Returns:
        What waits for that; None in any other process, and where nothing is mapped.
    """
    if not is_worker():
        return None
    maps = ReadOnlyFiles()
    paths = {path for array in arrays if (path := maps.path_of(array))}
    if not paths:
        return None
    thread = threading.Thread(
        target=_outlive, args=(FileWatch(paths),), name="attnquant-files", daemon=True
    )
    thread.start()
    return thread


def _outlive(watch: FileWatch) -> NoReturn:
    while (path := watch.changed()) is None:
        time.sleep(SECONDS)
    logger.error(
        "AttnQuant: %s was written to while it is served from, and the worker ends,"
        " since its answers would be wrong. Start again; to exchange a bundle, make the"
        " new one elsewhere and rename it.",
        path,
    )
    # At once: every token that is still made may be wrong.
    os._exit(1)
