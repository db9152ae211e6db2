"""Bands: the contiguous runs of layers that share a base."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from attnquant.errors import SettingError


def check_shared_blocks(shared_blocks: object, num_layers: int) -> int:
    """Return `shared_blocks` (G) if it is an integer with ``1 <= G <= L``.

    Raises:
        SettingError: Naming the bounds and the value found.
    """
    if (
        isinstance(shared_blocks, bool)
        or not isinstance(shared_blocks, int)
        or not 1 <= shared_blocks <= num_layers
    ):
        raise SettingError(
            "shared_blocks",
            expected=f"an integer from 1 to {num_layers} (the number of layers)",
            found=repr(shared_blocks),
        )
    return shared_blocks


def band_index(layer: int, num_layers: int, shared_blocks: int) -> int:
    """Return the band of a layer: ``layer * G // L``.

    Bands are contiguous and their sizes differ by at most one.

    Args:
        layer: Decoder layer, from 0.
        num_layers: L.
        shared_blocks: G, with ``1 <= G <= L``.

    Raises:
        SettingError: If G is out of bounds.
        IndexError: If there is no such layer.
    """
    check_shared_blocks(shared_blocks, num_layers)
    if not 0 <= layer < num_layers:
        msg = f"layer {layer} of a model with {num_layers} layers"
        raise IndexError(msg)
    return layer * shared_blocks // num_layers


def layer_to_band(num_layers: int, shared_blocks: int) -> tuple[int, ...]:
    """Return the band of every layer, as an equal contiguous split."""
    return tuple(
        band_index(layer, num_layers, shared_blocks) for layer in range(num_layers)
    )


def check_bands(bands: Sequence[object], num_layers: int) -> tuple[int, ...]:
    """Return the bands of all layers if they are contiguous runs, numbered from 0.

    Raises:
        SettingError: If there is not one per layer, or they are no such runs.
    """
    found = [band for band in bands if type(band) is int]
    if (
        not len(found) == len(bands) == num_layers
        or found[0] != 0
        or any(after - before not in {0, 1} for before, after in pairwise(found))
    ):
        raise SettingError(
            "layer_to_band",
            expected=f"{num_layers} numbers that begin with 0 and rise by at most 1",
            found=repr(list(bands)),
        )
    return tuple(found)
