"""Canonical names lead back to those that checkpoints have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnquant.errors import PluginError
from attnquant.export.names import checkpoint_names
from attnquant.theta.prefix_map import PrefixMap

parts = st.sampled_from(["", "model.", "language_model.", "a.b.", "tower."])
maps = st.dictionaries(parts, parts, min_size=1).map(PrefixMap)
names = st.tuples(parts, st.sampled_from(["norm.weight", "layers.0.x.weight"])).map(
    "".join
)


@given(maps, names)
def test_the_way_back_leads_to_the_same_name(prefix_map: PrefixMap, name: str) -> None:
    try:
        back = checkpoint_names([name], prefix_map)[name]
    except PluginError:
        # Right only if there is indeed no way: no prefix with the rest behind it.
        ways = [
            old + name.removeprefix(new)
            for old, new in prefix_map.prefixes.items()
            if name.startswith(new)
        ]
        assert all(prefix_map.canonical(way) != name for way in ways)
    else:
        assert prefix_map.canonical(back) == name


def test_of_several_ways_the_first_is_taken() -> None:
    prefix_map = PrefixMap(
        {"model.": "", "language_model.model.": "", "lm_head.": "lm_head."}
    )
    assert checkpoint_names(["norm.weight", "lm_head.weight"], prefix_map) == {
        "norm.weight": "model.norm.weight",
        # Not `model.lm_head.weight`, though that too would be read as the head.
        "lm_head.weight": "lm_head.weight",
    }


def test_no_way_back_is_the_plugin_s_fault() -> None:
    with pytest.raises(
        PluginError, match=r"a prefix that leads to norm\.weight, found 'm\.'"
    ):
        checkpoint_names(["norm.weight"], PrefixMap({"m.": "inner."}))
