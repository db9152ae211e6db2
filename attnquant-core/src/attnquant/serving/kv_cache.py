"""A cache that has room for the longest prompt that is accepted.

MAX 26.7 reckons that a sliding window keeps only its span, and sizes the cache and
bounds ``--max-length`` by that. But it takes pages for a whole prompt before it runs
any of it, those of sliding layers included, and gives back what is behind the window
only afterwards. A prompt that is short enough to be accepted may then find too few
pages in an empty cache, which ends MAX's worker and the server with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from max.nn.kv_cache import MultiKVCacheParams
from max.nn.kv_cache.cache_params import KVLeafRegion, PagedKVLeafRegion


@dataclasses.dataclass(frozen=True)
class WholePromptLeaf(PagedKVLeafRegion):
    """Pages of one kind of layer, counted as a prompt takes them."""

    def blocks_to_reserve(self, num_blocks: int, *, enable_prefix_caching: bool) -> int:
        """Return `num_blocks`, whatever the window."""
        del enable_prefix_caching
        return num_blocks


class WholePromptCacheParams(MultiKVCacheParams):
    """Caches of several kinds of layers, each with room for a whole prompt."""

    def leaves(self, _prefix: str = "") -> Mapping[str, KVLeafRegion]:
        """Return MAX's, those with a window replaced."""
        return {
            name: _whole(leaf) if isinstance(leaf, PagedKVLeafRegion) else leaf
            for name, leaf in super().leaves(_prefix).items()
        }


def reserve_whole_prompts(params: Any) -> Any:
    """Return a cache layout that is sized so that any accepted prompt fits.

    Args:
        params: The layout a plugin gives. One of a single kind of layer is returned
            as it is: MAX sizes that one by the whole length.
    """
    # Exactly MAX's own class: a plugin's subclass knows what it does.
    if type(params) is not MultiKVCacheParams:
        return params
    return WholePromptCacheParams(**_fields(params))


def _whole(leaf: PagedKVLeafRegion) -> WholePromptLeaf:
    return WholePromptLeaf(**_fields(leaf))


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
