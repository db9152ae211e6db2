"""Hooks: called for one architecture, and checked in what they return."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnquant.errors import PluginError
from attnquant.plugins import Supplied, find_plugins
from core_support.plugins import TINY_PLUGIN, install


def tiny(home: Path, source: str = TINY_PLUGIN) -> Supplied:
    install(home, "tiny", source)
    return find_plugins({}).find("TinyForCausalLM")


def test_hooks_are_called_for_the_architecture(home: Path) -> None:
    source = TINY_PLUGIN.replace("map():", "map(architecture, config):").replace(
        '{"model.": "", ', "{config['prefix']: architecture, "
    )
    prefix_map = tiny(home, source).prefix_map({"prefix": "p."})
    assert prefix_map.canonical("p.x") == "TinyForCausalLMx"


@pytest.mark.parametrize("result", ["None", "42", "{'model.': ''}"])
def test_a_prefix_map_that_is_none_is_an_error(home: Path, result: str) -> None:
    source = TINY_PLUGIN.replace("return PrefixMap(", f"return {result}\n    (")
    with pytest.raises(PluginError) as caught:
        tiny(home, source).prefix_map({})
    error = caught.value
    assert "plugin tiny (attnquant-tiny)" in error.subject
    assert "hook attnquant_prefix_map" in error.subject
    assert error.expected == "a PrefixMap for TinyForCausalLM"
    assert error.found == repr(eval(result))


@pytest.mark.parametrize("result", ["None", "'uniform'"])
def test_a_grouping_that_is_no_function_is_an_error(home: Path, result: str) -> None:
    source = TINY_PLUGIN.replace("return uniform", f"return {result}")
    with pytest.raises(PluginError, match="hook attnquant_w0_group") as caught:
        tiny(home, source).grouping({})
    assert caught.value.found == repr(eval(result))


def test_a_hook_that_is_left_out_is_named_when_it_is_needed(home: Path) -> None:
    supplied = tiny(home)
    with pytest.raises(PluginError, match="hook attnquant_attention"):
        supplied.attention_factory(None)
    with pytest.raises(PluginError, match="hook attnquant_kv_params"):
        supplied.kv_params(
            huggingface_config=None,
            pipeline_config=None,
            devices=[],
            kv_cache_config=None,
            cache_dtype=None,
        )


def test_what_a_later_hook_raises_becomes_the_plugins_error(home: Path) -> None:
    source = TINY_PLUGIN.replace("return uniform", "return {}['head_dim']")
    with pytest.raises(PluginError) as caught:
        tiny(home, source).grouping({})
    assert "plugin tiny (attnquant-tiny), hook attnquant_w0_group" in str(caught.value)
    assert "KeyError: 'head_dim'" in caught.value.found
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_of_attnquants_own_passes_through_a_hook(home: Path) -> None:
    raised = "from attnquant.errors import ServingError; raise ServingError('x')"
    source = TINY_PLUGIN.replace("return uniform", raised)
    supplied = tiny(home, source)
    with pytest.raises(Exception, match=r"^x$") as caught:
        supplied.grouping({})
    assert type(caught.value).__name__ == "ServingError"
