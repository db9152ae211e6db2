"""A bundle as a PEFT adapter on a base: LoRA's own form of ``W0 + U·diag(s)·V``.

LoRA adds ``(alpha / r)·B·A`` to a weight. With ``A = V``, ``B = U·diag(s)`` and
``alpha = r`` that is the low-rank term; the weight it is added to is the layer's base.
In the base checkpoint, layers of one band so have equal projections, each written out:
what is shared in a bundle is not shared there.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from attnquant.errors import BundleError
from attnquant.export.dense import check_export, write_checkpoint
from attnquant.export.files import Progress, Read
from attnquant.export.names import checkpoint_names
from attnquant.export.record import RECORD, record
from attnquant.theta.bundle import Bundle
from attnquant.theta.directory import whole_directory
from attnquant.theta.dtypes import FLOAT32, Array, widen
from attnquant.theta.names import (
    FACTORS,
    BaseKey,
    base_name,
    factor_name,
    projection_name,
)
from attnquant.theta.prefix_map import PrefixMap
from attnquant.theta.tensor_file import TensorFile, TensorSpec, spec_bytes
from attnquant.theta.writer import SHARD_BYTES, write_json

BASE, ADAPTER = "base", "adapter"
"""The two directories of an export."""

_PREFIX = "base_model.model."
"""What PEFT puts before a module's name."""

_WEIGHT = ".weight"


def export_peft(
    bundle: Bundle,
    prefix_map: PrefixMap,
    out: Path,
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> int:
    """Write ``base/``, a checkpoint of the bases, and ``adapter/``, a LoRA on it.

    The base has the bundle's dtype, and its projections are the bases bit for bit; the
    adapter is float32.

    Args:
        bundle: An open bundle.
        prefix_map: The architecture's.
        out: The directory to make.
        overwrite: Replace an earlier export.
        shard_bytes: Size above which the base's next file begins.
        progress: Called as work goes on.

    Returns:
        The size of all tensors in bytes.

    Raises:
        BundleError: If there is no low-rank term to make an adapter of.
        SettingError: If `out` must not be written to.
        CheckpointError: If a tensor cannot be read, or the directory not be written.
            Nothing is left under `out` then.
    """
    check_export(bundle, out, overwrite=overwrite)
    adapted = _adapted(bundle)
    if not adapted:
        raise BundleError(
            str(bundle.checkpoint.path),
            expected="low-rank terms, which an adapter would hold",
            found="none (every rank is 0)",
            hint="Export it with `--to dense`.",
        )
    with whole_directory(out, "an adapter") as directory:
        base, adapter = directory / BASE, directory / ADAPTER
        base.mkdir()
        adapter.mkdir()
        size = write_checkpoint(
            base,
            bundle,
            prefix_map,
            _bases(bundle),
            shard_bytes=shard_bytes,
            progress=progress,
        )
        size += _write_adapter(adapter, bundle, prefix_map, adapted)
        write_json(directory / RECORD, record(bundle, "peft"))
    return size


def _adapted(bundle: Bundle) -> dict[tuple[BaseKey, int], int]:
    """Return the rank of every projection that has a low-rank term."""
    layout = bundle.info.layout
    return {
        (base, layer): layout.rank_of(base)
        for base, layers in layout.bases.items()
        for layer in layers
        if layout.rank_of(base)
    }


def _bases(bundle: Bundle) -> tuple[dict[str, TensorSpec], dict[str, Read]]:
    specs: dict[str, TensorSpec] = {}
    reads: dict[str, Read] = {}
    stored = bundle.checkpoint.tensors
    for base, layers in bundle.info.layout.bases.items():
        info = stored.infos[base_name(*base)]
        for layer in layers:
            name = projection_name(layer, base.family)
            specs[name] = (info.dtype, info.shape)
            reads[name] = partial(stored.__getitem__, base_name(*base))
    return specs, reads


def _write_adapter(
    directory: Path,
    bundle: Bundle,
    prefix_map: PrefixMap,
    adapted: dict[tuple[BaseKey, int], int],
) -> int:
    layout = bundle.info.layout
    canonical = [projection_name(layer, base.family) for base, layer in adapted]
    names = checkpoint_names(canonical, prefix_map)
    specs: dict[str, TensorSpec] = {}
    reads: dict[str, Read] = {}
    ranks: dict[str, int] = {}
    for (base, layer), rank in adapted.items():
        name = names[projection_name(layer, base.family)].removesuffix(_WEIGHT)
        out_dim, in_dim = layout.shapes[base]
        ranks[name] = rank
        key = f"{_PREFIX}{name}.lora_A{_WEIGHT}"
        specs[key] = (FLOAT32, (rank, in_dim))
        reads[key] = partial(_lora_a, bundle, base, layer)
        key = f"{_PREFIX}{name}.lora_B{_WEIGHT}"
        specs[key] = (FLOAT32, (out_dim, rank))
        reads[key] = partial(_lora_b, bundle, base, layer)
    path = directory / "adapter_model.safetensors"
    with TensorFile(path, specs, {"format": "pt"}) as file:
        for key, read in reads.items():
            file.write(key, read())
    write_json(directory / "adapter_config.json", _config(ranks))
    return sum(map(spec_bytes, specs.values()))


def _lora_a(bundle: Bundle, base: BaseKey, layer: int) -> Array:
    return widen(_factor(bundle, base, layer, "V"))


def _lora_b(bundle: Bundle, base: BaseKey, layer: int) -> Array:
    left = _factor(bundle, base, layer, "U").astype(np.float64)
    s = _factor(bundle, base, layer, "s").astype(np.float64)
    return (left * s).astype(np.float32)


def _factor(bundle: Bundle, base: BaseKey, layer: int, factor: str) -> Array:
    assert factor in FACTORS
    return bundle.checkpoint.tensors[factor_name(layer, base.family, factor)]


def _config(ranks: dict[str, int]) -> dict[str, Any]:
    """Return PEFT's description of the adapter.

    Modules are named in full, so that none is adapted that has no low-rank term. Both
    patterns give each its own rank, and alpha equal to it: the scale is 1 everywhere.
    """
    rank = max(ranks.values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted(ranks),
        "rank_pattern": dict(sorted(ranks.items())),
        "alpha_pattern": dict(sorted(ranks.items())),
    }
