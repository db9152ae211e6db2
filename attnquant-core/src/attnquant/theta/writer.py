"""Writing a theta bundle: shard by shard, then all at once under its final name.

Everything is written into a hidden sibling directory that is renamed at the end. An
interrupted or failed run leaves nothing under the final name, and removes the sibling.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import attnquant
from attnquant.errors import CheckpointError, SettingError
from attnquant.theta.bundle import BundleInfo, Source
from attnquant.theta.checkpoint import (
    BUNDLE_KEY,
    CONFIG_NAME,
    INDEX_NAME,
    Checkpoint,
    RenamedTensors,
    read_json,
    sha256,
)
from attnquant.theta.decompose import (
    METHOD,
    FamilyErrors,
    check_finite,
    iter_decomposed,
    kept_names,
    projection_shapes,
)
from attnquant.theta.directory import check_target, whole_directory
from attnquant.theta.dtypes import Array, common_storage_dtype, storage_dtype
from attnquant.theta.grouping import Grouping
from attnquant.theta.layout import (
    ThetaLayout,
    check_positive_rank,
    check_rank_bound,
    make_layout,
)
from attnquant.theta.names import projection_name
from attnquant.theta.prefix_map import PrefixMap

SHARD_BYTES = 2_000_000_000
"""Default size above which a bundle's next shard begins."""

_TEMPLATES = "additional_chat_templates"
_WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
)

Progress = Callable[[str, int, int], None]
"""Called with what has just been written, the steps done, and the steps in all."""


@dataclass(frozen=True)
class Plan:
    """A decomposition that has been checked and not yet begun.

    Attributes:
        checkpoint: What is decomposed.
        tensors: Its tensors under canonical names.
        layout: Which theta tensors there will be.
        dtype: Their storage dtype.
    """

    checkpoint: Checkpoint
    tensors: RenamedTensors
    layout: ThetaLayout
    dtype: str


@dataclass(frozen=True)
class Written:
    """What `write_bundle` made: where, its block, and bytes before and after."""

    path: Path
    info: BundleInfo
    source_bytes: int
    bundle_bytes: int


def plan_decomposition(
    checkpoint: Checkpoint,
    prefix_map: PrefixMap,
    grouping: Grouping,
    *,
    shared_blocks: int,
    lora_rank: int | None,
    tie_families: str = "all",
    dtype: str | None = None,
) -> Plan:
    """Check a checkpoint and settings against each other, reading no weights.

    Args:
        checkpoint: An open standard checkpoint.
        prefix_map: The architecture's.
        grouping: The architecture's W0 grouping key.
        shared_blocks: G, from 1 to the number of layers.
        lora_rank: r; may be None at passthrough.
        tie_families: ``"all"`` or ``"attn"``.
        dtype: Storage dtype; by default that of the checkpoint's projections.

    Raises:
        CheckpointError: If the checkpoint is a bundle already, or its tensors are
            not those of the architecture.
        SettingError: If a setting is out of bounds.
    """
    if checkpoint.is_bundle:
        raise CheckpointError(
            str(checkpoint.path),
            expected="a standard checkpoint",
            found="a theta bundle",
            hint="Decompose the checkpoint that it was made from.",
        )
    if lora_rank is not None:
        check_positive_rank(lora_rank)
    if dtype is not None:
        storage_dtype(dtype)
    sources = prefix_map.rename(checkpoint.tensors)
    if checkpoint.text_config.get("tie_word_embeddings") is True:
        # A copy of the embedding that no loader uses.
        sources.pop("lm_head.weight", None)
    tensors = RenamedTensors(checkpoint.tensors, sources)
    shapes = projection_shapes(tensors.infos)
    layout = make_layout(
        shapes,
        num_layers=checkpoint.num_layers,
        shared_blocks=shared_blocks,
        lora_rank=lora_rank,
        tie_families=tie_families,
        grouping=grouping,
    )
    if lora_rank is not None:
        check_rank_bound(
            lora_rank, {projection_name(*key): shape for key, shape in shapes.items()}
        )
    default = common_storage_dtype(
        str(tensors.infos[projection_name(*key)].dtype) for key in shapes
    )
    return Plan(checkpoint, tensors, layout, dtype or default)


def write_bundle(
    plan: Plan,
    out: Path,
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Written:
    """Decompose and write a theta bundle.

    Args:
        plan: From `plan_decomposition`.
        out: The directory to make.
        overwrite: Replace `out` if it exists.
        shard_bytes: Size above which the next shard begins.
        progress: Called as work goes on.

    Raises:
        SettingError: If `out` exists and must not be replaced, or `shard_bytes` is
            not positive.
        CheckpointError: If a tensor is not finite or cannot be read, or if the
            bundle cannot be written. Nothing is left under `out` then.
    """
    check_target(
        out,
        plan.checkpoint.path,
        overwrite=overwrite,
        what="a theta bundle",
        is_one=_is_bundle,
    )
    if shard_bytes < 1:
        raise SettingError(
            "shard_bytes", expected="a positive number", found=repr(shard_bytes)
        )
    with whole_directory(out, "a bundle") as directory:
        info, size = _write_into(directory, plan, shard_bytes, progress)
    return Written(
        path=out,
        info=info,
        source_bytes=sum(t.nbytes for t in plan.tensors.infos.values()),
        bundle_bytes=size,
    )


def _is_bundle(directory: Path) -> bool:
    try:
        return BUNDLE_KEY in read_json(directory / CONFIG_NAME)
    except CheckpointError:
        return False


@dataclass
class _ShardWriter:
    """Collects tensors and writes a shard whenever enough have come together."""

    directory: Path
    limit: int
    pending: dict[str, Array] = field(default_factory=dict)
    pending_bytes: int = 0
    total_bytes: int = 0
    shards: list[list[str]] = field(default_factory=list)

    def add(self, name: str, array: Array) -> None:
        if self.pending and self.pending_bytes + array.nbytes > self.limit:
            self._flush()
        # Not ascontiguousarray, which makes a scalar a vector.
        self.pending[name] = np.asarray(array, order="C")
        self.pending_bytes += array.nbytes

    def finish(self) -> None:
        """Write what is left, give shards their final names, write the index."""
        self._flush()
        count = len(self.shards)
        weight_map = {}
        for number, names in enumerate(self.shards, start=1):
            final = f"model-{number:05}-of-{count:05}.safetensors"
            self._part(number).rename(self.directory / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {
            "metadata": {"total_size": self.total_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_json(self.directory / INDEX_NAME, index)

    def _part(self, number: int) -> Path:
        return self.directory / f"part-{number:05}"

    def _flush(self) -> None:
        if not self.pending:
            return
        path = self._part(len(self.shards) + 1)
        save_file(self.pending, path, metadata={"format": "pt"})
        with path.open("rb") as file:
            os.fsync(file.fileno())
        path.chmod(0o644)  # safetensors makes files that only their owner can read
        self.shards.append(list(self.pending))
        self.total_bytes += self.pending_bytes
        self.pending, self.pending_bytes = {}, 0


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, indented, with a newline at the end."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_into(
    directory: Path, plan: Plan, shard_bytes: int, progress: Progress | None
) -> tuple[BundleInfo, int]:
    layout = plan.layout
    shards = _ShardWriter(directory, shard_bytes)
    errors = FamilyErrors()
    kept: dict[str, tuple[str, tuple[int, ...]]] = {}
    untouched = kept_names(plan.tensors, layout)
    total = sum(map(len, layout.bases.values())) + len(untouched)
    done = 0

    def step(what: str, count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(what, done, total)

    for part in iter_decomposed(plan.tensors, layout, plan.dtype):
        errors.add(part)
        for name, array in part.tensors.items():
            shards.add(name, array)
        step(next(iter(part.tensors)), len(layout.bases[part.base]))
    for name in untouched:
        array = plan.tensors[name]
        check_finite(name, array)
        kept[name] = (str(array.dtype), array.shape)
        shards.add(name, array)
        step(name, 1)
    shards.finish()
    copy_side_files(plan.checkpoint.path, directory)
    source = plan.checkpoint
    info = BundleInfo(
        method=METHOD,
        layout=layout,
        dtype=plan.dtype,
        kept=kept,
        source=Source(
            source.path.resolve().name,
            {shard.name: "sha256:" + sha256(shard) for shard in source.shards},
        ),
        error=errors.relative(),
        created_by={"attnquant-core": attnquant.__version__},
    )
    config = {**source.config, BUNDLE_KEY: info.to_json()}
    # Last, so that not even the hidden directory looks like a model before it is one.
    write_json(directory / CONFIG_NAME, config)
    return info, shards.total_bytes


def copy_side_files(source: Path, target: Path) -> None:
    """Copy tokenizer, template, generation and licence files of a checkpoint."""
    for path in sorted(source.iterdir()):
        is_weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(
            ".index.json"
        )
        if path.name == CONFIG_NAME or path.name.startswith(".") or is_weights:
            continue
        if path.is_file():
            shutil.copyfile(path, target / path.name)
    if (templates := source / _TEMPLATES).is_dir():
        shutil.copytree(templates, target / _TEMPLATES)
