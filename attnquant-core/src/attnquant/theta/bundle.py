"""The theta bundle on disk: its block in `config.json`, read, written and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnquant.errors import AttnQuantError, BundleError, SettingError
from attnquant.theta.bands import layer_to_band
from attnquant.theta.checkpoint import (
    BUNDLE_KEY,
    CONFIG_NAME,
    Checkpoint,
    open_checkpoint,
)
from attnquant.theta.dtypes import storage_dtype
from attnquant.theta.families import FAMILIES, tied_families_for
from attnquant.theta.grouping import Group, Grouping, NoBase
from attnquant.theta.layout import Shape, ThetaLayout, make_layout
from attnquant.theta.names import ProjectionKey, base_name, projection_name

FORMAT_VERSION = 2
"""The newest bundle format this version reads, and the one it writes."""


@dataclass(frozen=True)
class Source:
    """What a bundle was made from: a name, and each shard's SHA-256."""

    name: str
    shards: Mapping[str, str]


@dataclass(frozen=True)
class Calibration:
    """The statistics that a bundle's tensors were fitted to.

    Attributes:
        sha256: Hash of the statistics file, in hexadecimal.
        texts: Name, ``sha256`` and ``tokens`` of each text.
    """

    sha256: str
    texts: tuple[Mapping[str, str | int], ...]


@dataclass(frozen=True)
class BundleInfo:
    """The `attnquant` block of a bundle's `config.json`.

    Attributes:
        method: Identifier of the decomposition method.
        layout: Which theta tensors there are, and their shapes.
        dtype: Storage dtype of the theta tensors.
        kept: Name to ``(dtype, shape)`` of every other tensor.
        source: What it was made from.
        error: Achieved relative Frobenius error per family.
        created_by: Distribution name to version.
        weighted_error: Achieved relative error of the projections' outputs per
            family, over the calibration texts; empty without statistics.
        calibration: The statistics used; None without.
    """

    method: str
    layout: ThetaLayout
    dtype: str
    kept: Mapping[str, tuple[str, Shape]]
    source: Source
    error: Mapping[str, float]
    created_by: Mapping[str, str]
    weighted_error: Mapping[str, float] = field(default_factory=dict)
    calibration: Calibration | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the block as JSON data."""
        layout = self.layout
        return {
            "format_version": FORMAT_VERSION,
            "method": self.method,
            "shared_blocks": layout.shared_blocks,
            "lora_rank": layout.lora_rank,
            "ranks": {
                base_name(*base): rank for base, rank in layout.base_ranks.items()
            },
            "tie_families": layout.tie_families,
            "tied_projections": list(layout.tied_projections),
            "layer_to_band": {
                family: list(bands) for family, bands in layout.bands.items()
            },
            "groups": _groups_to_json(layout),
            "shapes": _shapes_to_json(layout),
            "dtype": self.dtype,
            "kept": {
                name: {"dtype": dtype, "shape": list(shape)}
                for name, (dtype, shape) in sorted(self.kept.items())
            },
            "source": {"name": self.source.name, "shards": dict(self.source.shards)},
            "calibration": _calibration_to_json(self.calibration),
            "error": dict(self.error),
            "weighted_error": dict(self.weighted_error),
            "created_by": dict(self.created_by),
        }

    def tensors(self) -> dict[str, tuple[str, Shape]]:
        """Return name to ``(dtype, shape)`` of every tensor the bundle must hold."""
        theta = {
            name: (self.dtype, shape) for name, shape in self.layout.tensors().items()
        }
        return {**theta, **self.kept}


@dataclass(frozen=True)
class Bundle:
    """A theta bundle, opened and checked."""

    checkpoint: Checkpoint
    info: BundleInfo


def parse_block(block: object, where: str = CONFIG_NAME) -> BundleInfo:
    """Read the `attnquant` block.

    Args:
        block: The JSON value.
        where: The file it came from, for messages.

    Raises:
        BundleError: If the format is newer than this version reads, or a field is
            missing, of the wrong type, or contradicts another.
    """
    if not isinstance(block, dict):
        raise BundleError(
            f"{where}: {BUNDLE_KEY}", expected="an object", found=json.dumps(block)
        )
    version = block.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise BundleError(
            f"{where}: {BUNDLE_KEY}.format_version",
            expected=f"a format from 1 to {FORMAT_VERSION}",
            found=json.dumps(version),
            hint="Upgrade attnquant-core to read a newer bundle.",
        )
    try:
        return _PARSERS[version](block)
    except AttnQuantError as error:
        raise BundleError(
            f"{where}: {BUNDLE_KEY}.{error.subject}",
            expected=error.expected,
            found=error.found,
        ) from error
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise BundleError(
            f"{where}: {BUNDLE_KEY}",
            expected=f"the fields of a version {version} block",
            found=f"{type(error).__name__}: {error}",
        ) from error


def open_bundle(path: Path) -> Bundle:
    """Open a theta bundle and check every tensor's presence, shape and dtype.

    Raises:
        CheckpointError: If the directory cannot be read.
        BundleError: If it is no bundle, is of a newer format, or holds a tensor more
            or less, or of another shape or dtype, than its block predicts.
    """
    checkpoint = open_checkpoint(path)
    if not checkpoint.is_bundle:
        raise BundleError(
            str(path / CONFIG_NAME),
            expected=f'an "{BUNDLE_KEY}" block (a theta bundle)',
            found="none",
            hint="Make a bundle with `attnquant decompose`.",
        )
    info = parse_block(checkpoint.config[BUNDLE_KEY], str(path / CONFIG_NAME))
    if checkpoint.num_layers != info.layout.num_layers:
        raise BundleError(
            f"{path / CONFIG_NAME}: num_hidden_layers",
            expected=f"{info.layout.num_layers}, as many as {BUNDLE_KEY} decomposes",
            found=str(checkpoint.num_layers),
        )
    found = {
        name: (str(tensor.dtype), tensor.shape)
        for name, tensor in checkpoint.tensors.infos.items()
    }
    check_tensors(info.tensors(), found)
    return Bundle(checkpoint, info)


def check_tensors(
    expected: Mapping[str, tuple[str, Shape]], found: Mapping[str, tuple[str, Shape]]
) -> None:
    """Compare tensors with what a block predicts.

    Args:
        expected: Name to ``(dtype, shape)``, as the block says.
        found: The same, as the files are.

    Raises:
        BundleError: Naming the first tensor that is missing, surplus or different.
    """
    for name, (dtype, shape) in expected.items():
        if name not in found:
            raise BundleError(
                name, expected=f"{dtype} {list(shape)}", found="no such tensor"
            )
        if found[name] != (dtype, shape):
            found_dtype, found_shape = found[name]
            raise BundleError(
                name,
                expected=f"{dtype} {list(shape)}",
                found=f"{found_dtype} {list(found_shape)}",
            )
    for name in found:
        if name not in expected:
            raise BundleError(
                name, expected="no such tensor", found="one that the block lacks"
            )


def _groups_to_json(layout: ThetaLayout) -> dict[str, list[str | None]]:
    return {
        family: [
            base.group if (base := layout.base_of(layer, family)) else None
            for layer in range(layout.num_layers)
        ]
        for family in layout.tied_projections
    }


def _shapes_to_json(layout: ThetaLayout) -> dict[str, dict[str, list[int]]]:
    shapes: dict[str, dict[str, list[int]]] = {}
    for base, shape in layout.shapes.items():
        shapes.setdefault(base.family, {})[base.group] = list(shape)
    return shapes


def _parse_version_1(block: Mapping[str, Any]) -> BundleInfo:
    """Read a block in which all families have the same bands and r."""
    return _parse(block, _parse_layout_1)


def _parse_version_2(block: Mapping[str, Any]) -> BundleInfo:
    """Read a block in which bands may differ by family and ranks by base."""
    return replace(
        _parse(block, _parse_layout_2),
        weighted_error=_numbers(block["weighted_error"]),
        calibration=_parse_calibration(block["calibration"]),
    )


_PARSERS = {1: _parse_version_1, 2: _parse_version_2}

Kept = Mapping[str, tuple[str, Shape]]


def _parse(
    block: Mapping[str, Any],
    parse_layout: Callable[[Mapping[str, Any], Kept], ThetaLayout],
) -> BundleInfo:
    storage_dtype(block["dtype"])
    kept = {
        str(name): (str(entry["dtype"]), tuple(int(dim) for dim in entry["shape"]))
        for name, entry in block["kept"].items()
    }
    return BundleInfo(
        method=str(block["method"]),
        layout=parse_layout(block, kept),
        dtype=block["dtype"],
        kept=kept,
        source=Source(
            str(block["source"]["name"]),
            {
                str(file): str(digest)
                for file, digest in block["source"]["shards"].items()
            },
        ),
        error=_numbers(block["error"]),
        created_by={str(key): str(value) for key, value in block["created_by"].items()},
    )


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(key): float(value) for key, value in values.items()}


def _calibration_to_json(calibration: Calibration | None) -> dict[str, Any] | None:
    if calibration is None:
        return None
    return {
        "sha256": calibration.sha256,
        "texts": [dict(text) for text in calibration.texts],
    }


def _parse_calibration(value: Mapping[str, Any] | None) -> Calibration | None:
    if value is None:
        return None
    texts: list[Mapping[str, str | int]] = [
        {
            "name": str(text["name"]),
            "sha256": str(text["sha256"]),
            "tokens": int(text["tokens"]),
        }
        for text in value["texts"]
    ]
    return Calibration(str(value["sha256"]), tuple(texts))


def _parse_layout_1(block: Mapping[str, Any], kept: Kept) -> ThetaLayout:
    bands = tuple(block["layer_to_band"])
    num_layers, blocks = len(bands), block["shared_blocks"]
    if bands != (expected := layer_to_band(num_layers, blocks)):
        _contradiction("layer_to_band", list(expected), list(bands))
    grouping, shapes = _parse_projections(block, kept, num_layers)
    layout = make_layout(
        shapes,
        num_layers=num_layers,
        shared_blocks=blocks,
        lora_rank=block["lora_rank"],
        tie_families=block["tie_families"],
        grouping=grouping,
    )
    _check_equal(block, lora_rank=layout.lora_rank, ranks=layout.ranks)
    return layout


def _parse_layout_2(block: Mapping[str, Any], kept: Kept) -> ThetaLayout:
    bands, ranks = block["layer_to_band"], block["ranks"]
    tied = tied_families_for(block["tie_families"])
    num_layers = len(bands[tied[0]])
    grouping, shapes = _parse_projections(block, kept, num_layers)
    if tuple(bands) != tied:
        _contradiction("layer_to_band", list(tied), list(bands))
    layout = make_layout(
        shapes,
        num_layers=num_layers,
        shared_blocks=num_layers,
        # What follows from bands and groups; the ranks themselves come next.
        lora_rank=block["lora_rank"] if any(ranks.values()) else 1,
        tie_families=block["tie_families"],
        grouping=grouping,
        bands=bands,
    )
    if not any(ranks.values()):
        layout = layout.with_ranks(dict.fromkeys(layout.bases, 0))
    names = {base_name(*base): base for base in layout.bases}
    if ranks.keys() != names.keys():
        _contradiction("ranks", sorted(names), sorted(ranks))
    layout = replace(
        layout, base_ranks={names[name]: rank for name, rank in ranks.items()}
    )
    for name, base in names.items():
        shared = len(layout.bases[base]) > 1
        bound = min(layout.lora_rank, *layout.shapes[base]) if shared else 0
        if type(ranks[name]) is not int or not 0 <= ranks[name] <= bound:
            raise SettingError(
                f"ranks.{name}",
                expected=f"a rank from 0 to {bound}",
                found=json.dumps(ranks[name]),
            )
    _check_equal(block, lora_rank=layout.lora_rank, shared_blocks=layout.shared_blocks)
    return layout


def _parse_projections(
    block: Mapping[str, Any], kept: Kept, num_layers: int
) -> tuple[Grouping, dict[ProjectionKey, Shape]]:
    """Return the grouping key and every projection's shape that a block stands for."""
    tied = tied_families_for(block["tie_families"])
    if tuple(block["tied_projections"]) != tied:
        _contradiction("tied_projections", list(tied), block["tied_projections"])
    groups, shapes = block["groups"], block["shapes"]

    def grouping(layer: int, family: str) -> Group:
        group = groups[family][layer] if family in tied else None
        if group is not None:
            return str(group)
        # Without a base it is among the kept tensors, or the model lacks it.
        name = projection_name(layer, family)
        return NoBase.DENSE if name in kept else NoBase.ABSENT

    def shape_of(key: ProjectionKey) -> Shape:
        group = grouping(*key)
        if isinstance(group, NoBase):
            return kept[projection_name(*key)][1]
        return tuple(int(dim) for dim in shapes[key.family][group])

    keys = [
        ProjectionKey(layer, family)
        for family in FAMILIES
        for layer in range(num_layers)
        if grouping(layer, family) is not NoBase.ABSENT
    ]
    return grouping, {key: shape_of(key) for key in keys}


def _check_equal(block: Mapping[str, Any], **expected: object) -> None:
    for name, value in expected.items():
        if type(block[name]) is not type(value) or block[name] != value:
            _contradiction(name, value, block[name])


def _contradiction(field: str, expected: object, found: object) -> None:
    raise SettingError(field, expected=json.dumps(expected), found=json.dumps(found))
