"""A bundle as a plain checkpoint: every projection is its ``W_eff``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from attnquant.errors import CheckpointError
from attnquant.export.files import Progress, Read, write_tensors
from attnquant.export.names import checkpoint_names
from attnquant.export.record import RECORD, is_export, record
from attnquant.theta.bundle import Bundle
from attnquant.theta.checkpoint import BUNDLE_KEY, CONFIG_NAME
from attnquant.theta.decompose import check_finite, effective_weight
from attnquant.theta.directory import check_target, whole_directory
from attnquant.theta.dtypes import Array, storage_dtype
from attnquant.theta.names import BaseKey, is_theta_name, projection_name
from attnquant.theta.prefix_map import PrefixMap
from attnquant.theta.tensor_file import TensorSpec
from attnquant.theta.writer import SHARD_BYTES, copy_side_files, write_json


def export_dense(
    bundle: Bundle,
    prefix_map: PrefixMap,
    out: Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> int:
    """Write a checkpoint that any software for the architecture reads.

    Tensors have the names that the architecture's checkpoints give them; `config.json`
    is the bundle's without its block. What was not decomposed stays as it is.

    Args:
        bundle: An open bundle.
        prefix_map: The architecture's.
        out: The directory to make.
        dtype: That of the projections, ``"float32"`` or ``"bfloat16"``; by default the
            bundle's. ``W_eff`` is formed in float64 and rounded once.
        overwrite: Replace an earlier export.
        shard_bytes: Size above which the next file begins.
        progress: Called as work goes on.

    Returns:
        The size of its tensors in bytes.

    Raises:
        SettingError: If `out` must not be written to, or there is no such dtype.
        CheckpointError: If a tensor cannot be read or is not finite in that dtype, or
            the directory cannot be written. Nothing is left under `out` then.
    """
    check_export(bundle, out, overwrite=overwrite)
    specs, reads = projections(bundle, dtype or bundle.info.dtype)
    with whole_directory(out, "a checkpoint") as directory:
        size = write_checkpoint(
            directory,
            bundle,
            prefix_map,
            (specs, reads),
            shard_bytes=shard_bytes,
            progress=progress,
        )
        write_json(directory / RECORD, record(bundle, "dense"))
    return size


def check_export(bundle: Bundle, out: Path, *, overwrite: bool) -> None:
    """Refuse a place that no export must be written to.

    Raises:
        SettingError: Naming it.
    """
    check_target(
        out,
        bundle.checkpoint.path,
        overwrite=overwrite,
        what="an earlier export",
        is_one=is_export,
    )


def projections(
    bundle: Bundle, dtype: str
) -> tuple[dict[str, TensorSpec], dict[str, Read]]:
    """Return what every decomposed projection is, by canonical name, and its W_eff."""
    target = storage_dtype(dtype)
    layout = bundle.info.layout
    specs: dict[str, TensorSpec] = {}
    reads: dict[str, Read] = {}

    def effective(base: BaseKey, layer: int) -> Array:
        name = projection_name(layer, base.family)
        array = effective_weight(bundle.checkpoint.tensors, base, layer).astype(target)
        check_finite(f"{name} in {dtype}", array)
        return array

    for base, layers in layout.bases.items():
        for layer in layers:
            name = projection_name(layer, base.family)
            specs[name] = (target, layout.shapes[base])
            reads[name] = partial(effective, base, layer)
    return specs, reads


def write_checkpoint(
    directory: Path,
    bundle: Bundle,
    prefix_map: PrefixMap,
    tensors: tuple[dict[str, TensorSpec], dict[str, Read]],
    *,
    shard_bytes: int,
    progress: Progress | None,
) -> int:
    """Write a whole checkpoint: given projections, and all else from the bundle.

    Args:
        directory: Where it goes.
        bundle: What everything else is taken from.
        prefix_map: The architecture's.
        tensors: Specs and readers of the projections, by canonical name.
        shard_bytes: Size above which the next file begins.
        progress: Called as work goes on.

    Returns:
        The size of its tensors in bytes.
    """
    specs, reads = dict(tensors[0]), dict(tensors[1])
    stored = bundle.checkpoint.tensors
    for name, info in sorted(stored.infos.items()):
        if not is_theta_name(name):
            specs[name] = (info.dtype, info.shape)
            reads[name] = partial(stored.__getitem__, name)
    names = checkpoint_names(sorted(specs), prefix_map)
    if len(set(names.values())) != len(names):
        raise CheckpointError(
            str(bundle.checkpoint.path),
            expected="tensors of different names in a checkpoint",
            found="two of one name",
        )
    size = write_tensors(
        directory,
        {names[name]: specs[name] for name in names},
        {names[name]: reads[name] for name in names},
        shard_bytes=shard_bytes,
        progress=progress,
    )
    copy_side_files(bundle.checkpoint.path, directory)
    config = dict(bundle.checkpoint.config)
    del config[BUNDLE_KEY]
    write_json(directory / CONFIG_NAME, config)
    return size
