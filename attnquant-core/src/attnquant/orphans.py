"""A serving worker ends when its server is gone.

MAX's server ends its worker when it is asked to stop. Killed, by hand or for want of
memory, it cannot, and MAX 26.7's worker goes on for ever, with the model in memory.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import threading
from typing import Protocol

WORKER = "Model Worker"
"""What MAX calls the process that runs the model."""

# Below MAX's own name, since MAX's console shows no other.
logger = logging.getLogger("max.pipelines.attnquant")


class _Process(Protocol):
    def join(self) -> None: ...


def is_worker() -> bool:
    """Return whether this process is the one in which MAX's server runs its model."""
    return multiprocessing.current_process().name == WORKER


@functools.cache
def end_with_server() -> threading.Thread | None:
    """In MAX's worker, end it as soon as its server has ended.

    Returns:
        What waits for that; None in any other process.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not is_worker():
        return None
    watch = threading.Thread(
        target=_outlive, args=(parent,), name="attnquant-orphans", daemon=True
    )
    watch.start()
    return watch


def _outlive(server: _Process) -> None:
    server.join()
    logger.error("AttnQuant: the server is gone, and its worker ends with it")
    # At once: there is nobody left to answer to, and nothing to write.
    os._exit(1)
