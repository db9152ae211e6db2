"""Old bundles stay readable: one of each format version is kept in `frozen/`.

Each folder holds a ``bundle`` as the first release of its format wrote it, and the
``original.safetensors`` it was made from. They are never made anew. Version 1 has 5
layers in 2 bands, groups, a dense and an absent projection, bfloat16, many shards.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from attnquant.theta import reconstruct, relative_frobenius_error
from attnquant.theta.bundle import FORMAT_VERSION, Bundle, open_bundle
from core_support.tiny import bits

FROZEN = Path(__file__).parent / "frozen"
VERSIONS = range(1, FORMAT_VERSION + 1)


def frozen(version: int) -> Bundle:
    return open_bundle(FROZEN / f"v{version}" / "bundle")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_frozen_bundle_still_opens(version: int) -> None:
    layout = frozen(version).info.layout
    assert (layout.num_layers, layout.shared_blocks, layout.lora_rank) == (5, 2, 3)
    assert layout.ranks["k_proj"] == 2


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
