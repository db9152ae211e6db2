"""A cache of MAX's has room for any prompt that is short enough to be accepted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from max.dtype import DType
from max.graph import DeviceRef
from max.nn.kv_cache import KVCacheParamInterface
from max.pipelines.architectures.gpt_oss.hybrid_kv_params_util import (
    hybrid_swa_full_kv_params,
)
from max.pipelines.kv_cache.paged_kv_cache.jenga_cache_manager import (
    JengaKVCacheManager,
)
from max.pipelines.kv_cache.registry import kv_cache_memory_size
from max.pipelines.lib import KVCacheConfig

from attnquant.serving.kv_cache import reserve_whole_prompts

PLENTY = 1 << 36


def hybrid(*, sliding: int, full: int, window: int) -> Any:
    """Return MAX's layout of a model with layers of both kinds."""
    return hybrid_swa_full_kv_params(
        layer_types=["sliding_attention"] * sliding + ["full_attention"] * full,
        sliding_window=window,
        pipeline_config=SimpleNamespace(  # type: ignore[arg-type]
            speculative=None, model=SimpleNamespace(data_parallel_degree=1)
        ),
        devices=[DeviceRef.CPU()],
        kv_cache_config=KVCacheConfig(),
        cache_dtype=DType.float32,
        n_kv_heads=1,
        head_dim=32,
    )


def holds_a_prompt(params: KVCacheParamInterface, available: int, tokens: int) -> bool:
    """Return whether an empty cache of a size has the pages a whole prompt takes.

    Pages of a kind of layer are cut from blocks that hold pages of no other kind.
    """
    geometry = JengaKVCacheManager._plan_geometry(params, available)
    pages = -(-tokens // params.page_size)
    needed = sum(-(-pages // ratio) for ratio in geometry.ratios.values())
    return needed <= geometry.num_huge_blocks - 1


def sized_for(params: KVCacheParamInterface, tokens: int, batch: int = 1) -> int:
    """Return how large MAX makes the cache where memory is no limit."""
    return kv_cache_memory_size(
        params, PLENTY, batch, tokens, is_di_enabled=False, model_name="any"
    )


LAYOUTS = st.builds(
    hybrid,
    sliding=st.integers(1, 30),
    full=st.integers(1, 8),
    window=st.sampled_from([128, 512, 1024, 4096]),
)


@given(params=LAYOUTS, tokens=st.integers(1, 20_000), batch=st.sampled_from([1, 16]))
@settings(max_examples=60, deadline=None)
def test_the_cache_holds_the_longest_prompt(
    params: KVCacheParamInterface, tokens: int, batch: int
) -> None:
    reserved = reserve_whole_prompts(params)
    assert holds_a_prompt(reserved, sized_for(reserved, tokens, batch), tokens)


@given(params=LAYOUTS, mebibytes=st.integers(64, 512))
@settings(max_examples=60, deadline=None)
def test_where_memory_is_scarce_the_longest_prompt_is_what_fits(
    params: KVCacheParamInterface, mebibytes: int
) -> None:
    reserved = reserve_whole_prompts(params)
    available = mebibytes << 20
    longest = JengaKVCacheManager.max_seq_len_fitting_in_cache(reserved, available)
    assert longest is not None
    assert holds_a_prompt(reserved, available, longest)
    assert not holds_a_prompt(reserved, available, longest + reserved.page_size)


def test_max_by_itself_accepts_prompts_that_its_cache_cannot_hold() -> None:
    # If this fails, MAX has mended it, and the module that is tested here can go.
    params = hybrid(sliding=7, full=1, window=128)
    available = sized_for(params, 1024)
    longest = JengaKVCacheManager.max_seq_len_fitting_in_cache(params, available)
    assert longest is None or longest >= 1024
    assert not holds_a_prompt(params, available, 1024)


def test_nothing_but_the_reckoning_changes() -> None:
    params = hybrid(sliding=7, full=1, window=128)
    reserved = reserve_whole_prompts(params)
    assert reserved.leaves().keys() == params.leaves().keys()
    for name, leaf in reserved.leaves().items():
        assert vars(leaf) == vars(params.leaves()[name])
    assert reserved.get_symbolic_inputs() == params.get_symbolic_inputs()
    assert reserve_whole_prompts(reserved) is reserved


def test_a_cache_of_one_kind_of_layer_is_left_alone() -> None:
    params = hybrid(sliding=7, full=1, window=128).children["full_attention"]
    assert reserve_whole_prompts(params) is params
