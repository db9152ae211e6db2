"""Writing a theta bundle: base by base, and under its final name when it is whole.

Everything is written into a hidden sibling directory that is renamed at the end. The
weight files have their final size from the start, and each tensor its place in them, so
that no more than one base is in memory; a journal says which bases are done. A run that
is interrupted leaves the hidden directory, and the same command goes on from there.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy

import attnquant
from attnquant.errors import CheckpointError, SettingError
from attnquant.theta.bundle import BundleInfo, Calibration, Source
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
    MEAN_SVD,
    WEIGHTED,
    DecomposedBase,
    FamilyErrors,
    check_finite,
    decompose_base,
    kept_names,
    projection_shapes,
)
from attnquant.theta.directory import check_target, resumable_directory
from attnquant.theta.dtypes import common_storage_dtype, storage_dtype
from attnquant.theta.families import PerFamily, per_family
from attnquant.theta.grouping import Grouping
from attnquant.theta.journal import Journal
from attnquant.theta.layout import (
    ThetaLayout,
    check_positive_rank,
    check_rank_bound,
    make_layout,
)
from attnquant.theta.names import BaseKey, ProjectionKey, base_name, projection_name
from attnquant.theta.prefix_map import PrefixMap
from attnquant.theta.shards import ShardWriter
from attnquant.theta.statistics import Statistics, describe_source
from attnquant.theta.tensor_file import TensorSpec, spec_bytes

SHARD_BYTES = 2_000_000_000
"""Default size above which a bundle's next shard begins."""

_BLOCK_BYTES = 1 << 24
"""How much of a tensor that is only copied is in memory at a time."""

_JOURNAL = "journal.jsonl"

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
        statistics: What the weighted method fits to; None for the plain one.
    """

    checkpoint: Checkpoint
    tensors: RenamedTensors
    layout: ThetaLayout
    dtype: str
    statistics: Statistics | None = None

    @property
    def method(self) -> str:
        """The method's identifier."""
        return MEAN_SVD if self.statistics is None else WEIGHTED


@dataclass(frozen=True)
class Written:
    """What `write_bundle` made: where, its block, bytes before and after, seconds."""

    path: Path
    info: BundleInfo
    source_bytes: int
    bundle_bytes: int
    seconds: float


def plan_decomposition(
    checkpoint: Checkpoint,
    prefix_map: PrefixMap,
    grouping: Grouping,
    *,
    shared_blocks: int | PerFamily,
    lora_rank: int | PerFamily | None,
    tie_families: str = "all",
    dtype: str | None = None,
    statistics: Statistics | None = None,
) -> Plan:
    """Check a checkpoint and settings against each other, reading no weights.

    Args:
        checkpoint: An open standard checkpoint.
        prefix_map: The architecture's.
        grouping: The architecture's W0 grouping key.
        shared_blocks: G, from 1 to the number of layers; of all families or of each.
        lora_rank: r, of all families or of each; may be None at passthrough.
        tie_families: ``"all"`` or ``"attn"``.
        dtype: Storage dtype; by default that of the checkpoint's projections.
        statistics: Calibration statistics of this checkpoint, for the weighted
            method; without them the method is the plain one.

    Raises:
        CheckpointError: If the checkpoint is a bundle already, its tensors are not
            those of the architecture, or the statistics lack a moment it needs.
        SettingError: If a setting is out of bounds.
    """
    if checkpoint.is_bundle:
        raise CheckpointError(
            str(checkpoint.path),
            expected="a standard checkpoint",
            found="a theta bundle",
            hint="Decompose the checkpoint that it was made from.",
        )
    rank = per_family(lora_rank)
    for value in [*rank.named.values(), rank.default]:
        if value is not None:
            check_positive_rank(value)
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
    if rank.default is not None:
        check_rank_bound(
            rank.default,
            {projection_name(*key): shape for key, shape in shapes.items()},
        )
    if statistics is not None:
        statistics.check_shapes(
            {
                ProjectionKey(layer, base.family): layout.shapes[base]
                for base, layers in layout.bases.items()
                for layer in layers
                if layout.rank_of(base)
            }
        )
    default = common_storage_dtype(
        str(tensors.infos[projection_name(*key)].dtype) for key in shapes
    )
    return Plan(checkpoint, tensors, layout, dtype or default, statistics)


def write_bundle(
    plan: Plan,
    out: Path,
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Written:
    """Decompose and write a theta bundle, or go on with one that was interrupted.

    Args:
        plan: From `plan_decomposition`.
        out: The directory to make.
        overwrite: Replace `out` if it exists.
        shard_bytes: Size above which the next shard begins.
        jobs: How many bases are worked on at a time, each with its own memory.
        progress: Called as work goes on.

    Raises:
        SettingError: If `out` exists and must not be replaced, `shard_bytes` or `jobs`
            is not positive, or another process is writing there.
        CheckpointError: If the statistics are of other weights, a tensor is not finite
            or cannot be read, or the bundle cannot be written. Nothing is left under
            `out` then.
    """
    check_target(
        out,
        plan.checkpoint.path,
        overwrite=overwrite,
        what="a theta bundle",
        is_one=_is_bundle,
    )
    for name, value in {"shard_bytes": shard_bytes, "jobs": jobs}.items():
        if value < 1:
            raise SettingError(name, expected="a positive number", found=repr(value))
    started = time.perf_counter()
    source = describe_source(plan.checkpoint)
    if plan.statistics is not None:
        plan.statistics.check_model(source)
    calibration = _calibration(plan.statistics)
    run = _Run(plan, shard_bytes, progress)
    ingredients = {
        "source": dataclasses.asdict(source),
        "calibration": calibration and dataclasses.asdict(calibration),
        "method": plan.method,
        "dtype": plan.dtype,
        "tensors": {name: str(spec) for name, spec in run.specs.items()},
        "bands": {family: list(b) for family, b in plan.layout.bands.items()},
        "shard_bytes": shard_bytes,
        "versions": [attnquant.__version__, np.__version__, scipy.__version__],
    }
    with resumable_directory(out, "a bundle", ingredients) as directory:
        errors = run.write_tensors(directory, jobs)
        copy_side_files(plan.checkpoint.path, directory)
        info = BundleInfo(
            method=plan.method,
            layout=plan.layout,
            dtype=plan.dtype,
            kept=run.kept,
            source=Source(source.name, source.shards),
            error=errors.weights.relative(),
            created_by={"attnquant-core": attnquant.__version__},
            weighted_error=errors.outputs.relative(),
            calibration=calibration,
        )
        config = {**plan.checkpoint.config, BUNDLE_KEY: info.to_json()}
        # Last, so that not even the hidden directory looks like a model before it is
        # one.
        write_json(directory / CONFIG_NAME, config)
    return Written(
        path=out,
        info=info,
        source_bytes=sum(t.nbytes for t in plan.tensors.infos.values()),
        bundle_bytes=sum(spec_bytes(spec) for spec in run.specs.values()),
        seconds=time.perf_counter() - started,
    )


def _is_bundle(directory: Path) -> bool:
    try:
        return BUNDLE_KEY in read_json(directory / CONFIG_NAME)
    except CheckpointError:
        return False


@dataclass
class _Errors:
    """What was lost per family: of the weights, and of the projections' outputs."""

    weights: FamilyErrors = field(default_factory=FamilyErrors)
    outputs: FamilyErrors = field(default_factory=FamilyErrors)

    def add(self, family: str, record: Mapping[str, Any]) -> None:
        self.weights.add(family, record["squared_error"], record["squared_norm"])
        if record["output_error"] is not None:
            self.outputs.add(family, record["output_error"], record["output_norm"])


class _Run:
    """One plan's tensors on their way to the disk."""

    def __init__(self, plan: Plan, shard_bytes: int, progress: Progress | None) -> None:
        self._plan = plan
        self._shard_bytes = shard_bytes
        self._progress = progress
        self._done = 0
        infos = plan.tensors.infos
        self._untouched = kept_names(plan.tensors, plan.layout)
        self.kept = {
            name: (str(infos[name].dtype), infos[name].shape)
            for name in self._untouched
        }
        theta = storage_dtype(plan.dtype)
        self.specs: dict[str, TensorSpec] = {
            name: (theta, shape) for name, shape in plan.layout.tensors().items()
        }
        self.specs |= {n: (infos[n].dtype, infos[n].shape) for n in self._untouched}
        self._steps = len(self._untouched) + sum(map(len, plan.layout.bases.values()))

    def write_tensors(self, directory: Path, jobs: int) -> _Errors:
        """Write all weight files and their index; return what was lost."""
        layout = self._plan.layout
        with (
            ShardWriter(directory, self.specs, self._shard_bytes) as shards,
            Journal(directory / _JOURNAL) as journal,
        ):
            ready = [base for base in layout.bases if base_name(*base) in journal]
            for base in ready:
                self._step(base_name(*base), len(layout.bases[base]))
            todo = [base for base in layout.bases if base_name(*base) not in journal]
            for part in self._decomposed(todo, jobs):
                for name, array in part.tensors.items():
                    shards.write(name, array)
                shards.flush(part.tensors)
                journal.add(base_name(*part.base), _record(part))
                self._step(base_name(*part.base), len(layout.bases[part.base]))
            for name in self._untouched:
                if name not in journal:
                    for row, block in self._plan.tensors.rows(name, _BLOCK_BYTES):
                        check_finite(name, block, row)
                        shards.write(name, block, row)
                    shards.flush([name])
                    journal.add(name, {})
                self._step(name, 1)
            errors = _Errors()
            for base in layout.bases:
                errors.add(base.family, journal[base_name(*base)])
            write_json(directory / INDEX_NAME, shards.index())
        (directory / _JOURNAL).unlink()
        return errors

    def _decomposed(
        self, bases: Sequence[BaseKey], jobs: int
    ) -> Iterator[DecomposedBase]:
        plan = self._plan

        def one(base: BaseKey) -> DecomposedBase:
            return decompose_base(
                plan.tensors, plan.layout, base, plan.dtype, plan.statistics
            )

        if jobs == 1:
            yield from map(one, bases)
            return
        with ThreadPoolExecutor(jobs) as pool:
            waiting = deque(bases)
            running: set[Future[DecomposedBase]] = set()
            try:
                while waiting or running:
                    while waiting and len(running) < jobs:
                        running.add(pool.submit(one, waiting.popleft()))
                    finished, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        yield future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _step(self, what: str, count: int) -> None:
        self._done += count
        if self._progress:
            self._progress(what, self._done, self._steps)


def _record(part: DecomposedBase) -> dict[str, float | None]:
    return {
        "squared_error": part.squared_error,
        "squared_norm": part.squared_norm,
        "output_error": part.output_error,
        "output_norm": part.output_norm,
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, indented, with a newline at the end."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _calibration(statistics: Statistics | None) -> Calibration | None:
    if statistics is None:
        return None
    return Calibration(
        sha256(statistics.path),
        tuple(dataclasses.asdict(text) for text in statistics.texts),
    )


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
        shutil.copytree(templates, target / _TEMPLATES, dirs_exist_ok=True)
