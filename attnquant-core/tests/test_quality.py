"""What a bundle records tells whether its setting is one that is of no use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attnquant.quality import doubtful
from attnquant.theta.bundle import BundleInfo
from attnquant.theta.families import FAMILIES
from core_support.bundles import write_tiny_bundle
from core_support.tiny import FULL_RANK


def said(info: BundleInfo, **changes: object) -> str:
    changed = replace(info, **changes)  # type: ignore[arg-type]
    return doubtful(changed.layout, changed)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> BundleInfo:
    return write_tiny_bundle(tmp_path_factory.mktemp("shared")).info


def test_the_plain_method_is_of_no_use_where_layers_share(shared: BundleInfo) -> None:
    assert said(shared).startswith("G=2 of 4 layers by the method mean-svd")


def test_nor_is_a_checkpoint_that_is_decomposed_at_the_start(
    shared: BundleInfo,
) -> None:
    assert "mean-svd" in doubtful(shared.layout, None)


def test_the_plain_method_at_full_rank_loses_nothing(tmp_path: Path) -> None:
    assert said(write_tiny_bundle(tmp_path, rank=FULL_RANK).info) == ""


def test_passthrough_is_the_original(tmp_path: Path) -> None:
    info = write_tiny_bundle(tmp_path, blocks=4, rank=None).info
    assert said(info) == ""
    assert doubtful(info.layout, None) == ""


# The recorded errors of the settings of the page "Quality", and what it calls them.
@pytest.mark.parametrize(
    ("errors", "usable"),
    [
        ((0.176, 0.137, 0.155, 0.206, 0.218, 0.221, 0.264), True),
        ((0.521, 0.347, 0.0, 0.0, 0.0, 0.0, 0.0), True),
        ((0.521, 0.347, 0.483, 0.626), True),
        ((0.521, 0.347, 0.483, 0.626, 0.62, 0.646, 0.679), False),
    ],
    ids=["G=17", "G=9 q and k", "G=9 attention", "G=9"],
)
def test_calibrated_bundles_are_judged_as_the_page_does(
    shared: BundleInfo, errors: tuple[float, ...], *, usable: bool
) -> None:
    error = dict(zip(FAMILIES, errors, strict=False))
    found = said(shared, method="weighted", error=error)
    assert (found == "") == usable
    if not usable:
        assert "56% of the weights lost" in found
