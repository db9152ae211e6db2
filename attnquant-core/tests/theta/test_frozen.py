"""Old bundles stay readable: one of each format version is kept in `frozen/`.

Each folder holds a ``bundle`` as the first release of its format wrote it, and the
``original.safetensors`` it was made from. They are never made anew. Version 1 has 5
layers in 2 bands, groups, a dense and an absent projection, bfloat16, many shards.
Version 2 has beside that bands that differ by family, ranks that differ by base, and
statistics that it was fitted to.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from attnquant.theta import reconstruct, relative_frobenius_error
from attnquant.theta.bundle import FORMAT_VERSION, Bundle, open_bundle
from attnquant.theta.families import FAMILIES
from attnquant.theta.names import BaseKey
from core_support.tiny import bits

FROZEN = Path(__file__).parent / "frozen"
VERSIONS = range(1, FORMAT_VERSION + 1)
BLOCKS_2 = dict.fromkeys(FAMILIES, 5) | {
    "k_proj": 2,
    "o_proj": 2,
    "gate_proj": 2,
    "up_proj": 2,
}


def frozen(version: int) -> Bundle:
    return open_bundle(FROZEN / f"v{version}" / "bundle")


def test_version_1_still_opens() -> None:
    info = frozen(1).info
    layout = info.layout
    assert (layout.num_layers, layout.shared_blocks, layout.lora_rank) == (5, 2, 3)
    assert layout.ranks["k_proj"] == 2
    assert layout.has_equal_bands
    assert layout.has_equal_ranks
    assert (info.method, info.weighted_error, info.calibration) == (
        "mean-svd",
        {},
        None,
    )


def test_version_2_still_opens() -> None:
    info = frozen(2).info
    layout = info.layout
    assert (layout.num_layers, layout.shared_blocks, layout.lora_rank) == (5, 5, 3)
    assert layout.bands["up_proj"] == (0, 0, 1, 1, 1)
    assert layout.blocks == BLOCKS_2
    ranks = {layout.rank_of(BaseKey(band, "", "up_proj")) for band in (0, 1)}
    assert ranks == {1, 3}
    assert info.method == "weighted"
    assert sorted(info.weighted_error) == ["gate_proj", "k_proj", "o_proj", "up_proj"]
    assert info.calibration is not None
    assert info.calibration.texts[0]["name"] == "noise"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_frozen_bundle_stands_for_its_original_as_well_as_it_did(
    version: int,
) -> None:
    bundle = frozen(version)
    original = load_file(FROZEN / f"v{version}" / "original.safetensors")
    weights = reconstruct(bundle.checkpoint.tensors, bundle.info.layout)
    for family, error in bundle.info.error.items():
        found = {name: w for name, w in weights.items() if family in name}
        assert relative_frobenius_error(original, found) == pytest.approx(
            error, rel=1e-4
        )


@pytest.mark.parametrize("version", VERSIONS)
def test_a_frozen_bundle_keeps_what_was_not_decomposed(version: int) -> None:
    bundle = frozen(version)
    original = load_file(FROZEN / f"v{version}" / "original.safetensors")
    assert "layers.0.self_attn.v_proj.weight" in bundle.info.kept
    for name in bundle.info.kept:
        assert bits(original[name]) == bits(bundle.checkpoint.tensors[name])
