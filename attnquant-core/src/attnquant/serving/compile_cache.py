"""MAX's compile cache around the loading of a model: checked before, told of after."""

from __future__ import annotations

import functools
import logging
import os

import importlib_metadata

from attnquant.graph_cache import GraphCache, cache_folder, outcome, used_files
from attnquant.loading import max_version
from attnquant.settings import CACHE_LIMIT
from attnquant.sizes import format_bytes

# Below MAX's own name, since MAX's console shows no other.
logger = logging.getLogger("max.pipelines.attnquant")


class CheckedCache:
    """The cache of this process, from which nothing untrusted is loaded."""

    def __init__(self) -> None:
        """Remove what is damaged or was exchanged, with a warning for each file.

        Raises:
            ServingError: If there is no cache, or such a file cannot be removed.
            SettingError: If `ATTNQUANT_CACHE_LIMIT` is no size.
        """
        limit = CACHE_LIMIT.read(os.environ)
        self._limit = limit if isinstance(limit, int) else None
        self._cache = GraphCache(cache_folder())
        self._versions = [
            str(max_version()),
            importlib_metadata.version("mojo-compiler"),
        ]
        for removed in self._cache.check(versions=self._versions):
            logger.warning(
                "AttnQuant: removed %s from the compile cache, since %s; it is"
                " compiled anew",
                self._cache.folder / removed.path,
                removed.reason,
            )
        self._before = {entry.path for entry in self._cache.entries()}

    def loaded(self, graph: str) -> None:
        """Log what became of a graph that was loaded, and keep the cache's limit.

        Args:
            graph: Its name.
        """
        used = used_files(self._cache.folder)
        self._cache.check(used or (), self._versions)
        found = outcome(self._cache, graph, self._before, used)
        logger.info("AttnQuant: compile cache: %s", found)
        if self._limit is not None:
            removed = self._cache.shrink(self._limit, keep=used or ())
            if removed:
                logger.info(
                    "AttnQuant: removed %d files (%s) from the compile cache, which is"
                    " to be within %s",
                    len(removed),
                    format_bytes(sum(entry.size for entry in removed)),
                    format_bytes(self._limit),
                )


@functools.cache
def check_compile_cache() -> None:
    """Check the cache once in this process; see `CheckedCache`."""
    CheckedCache()
