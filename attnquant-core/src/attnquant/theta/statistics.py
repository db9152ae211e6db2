"""Calibration statistics: second moments of what each projection is applied to.

For an input ``x [in]`` of a projection, seen at many tokens, the statistic is the mean
of ``x·xᵀ``: ``C [in, in]``. Replacing a weight W by W' changes the projection's output
by ``(W - W')·x``, whose mean square is ``tr((W - W')·C·(W - W')ᵀ)``: that is the error
the weighted method makes small.

Projections that are applied to the same thing share a moment: `input_of`. A statistics
file is one safetensors file, read lazily; it serves every setting of G, r and ties.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from attnquant.errors import CheckpointError
from attnquant.theta.checkpoint import (
    CONFIG_NAME,
    Checkpoint,
    TensorInfo,
    read_header,
    sha256,
)
from attnquant.theta.dtypes import FLOAT32, Array
from attnquant.theta.names import ProjectionKey, projection_name
from attnquant.theta.tensor_file import TensorFile

FORMAT_VERSION = 1
"""The newest format of a statistics file this version reads, and the one it writes."""

INPUTS = ("qkv", "o", "gate_up", "down")
"""What a decoder layer's projections are applied to, in the order of computation."""

_INPUT_OF = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "o_proj": "o",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "down_proj": "down",
}
_FORMAT_KEY = "attnquant_statistics"
_TILE = 128
"""Rows and columns of a moment that are checked at a time."""

_ROUNDING = 1e-5
"""How far, relative to the diagonal, rounding may push a moment off a law."""

Moment = npt.NDArray[np.float32]


class InputKey(NamedTuple):
    """What some projections of one layer are applied to; `input` is of `INPUTS`."""

    layer: int
    input: str


@dataclass(frozen=True)
class SourceModel:
    """The model that statistics were collected on.

    Attributes:
        name: The checkpoint directory's name; for people, it identifies nothing.
        config: Hash of `config.json`, as ``sha256:...``.
        shards: File name to hash of each weight file.
    """

    name: str
    config: str
    shards: Mapping[str, str]

    def is_same_as(self, other: SourceModel) -> bool:
        """Return whether the weights are the same, whatever their directory's name."""
        return sorted(self.shards.values()) == sorted(other.shards.values())


@dataclass(frozen=True)
class CalibrationText:
    """A text that statistics were collected on.

    Attributes:
        name: For people.
        sha256: Hash of its UTF-8 bytes, in hexadecimal.
        tokens: How many of its tokens were used.
    """

    name: str
    sha256: str
    tokens: int


@dataclass(frozen=True)
class Statistics:
    """A statistics file, opened: its header was read, and no moment yet.

    Attributes:
        path: The file.
        model: What it was collected on.
        texts: The texts it was collected on.
        tokens: Over how many tokens each moment is the mean.
    """

    path: Path
    model: SourceModel
    texts: tuple[CalibrationText, ...]
    tokens: Mapping[InputKey, int]
    _infos: Mapping[InputKey, TensorInfo]

    def size(self, key: InputKey) -> int:
        """Return the number of features of an input.

        Raises:
            KeyError: If the file has no moment of it.
        """
        return self._infos[key].shape[0]

    def moment(self, key: InputKey) -> Moment:
        """Read one second moment, ``[in, in]``, and check that it can be one.

        Raises:
            KeyError: If the file has no moment of that input.
            CheckpointError: If it cannot be read, is not finite, not symmetric, or
                cannot be positive semidefinite.
        """
        info = self._infos[key]
        try:
            with safe_open(info.file, framework="np") as file:
                moment: Moment = file.get_tensor(moment_name(*key))
        except (SafetensorError, OSError) as error:
            raise _unreadable(self.path, error) from error
        _check_moment(f"{self.path}: {moment_name(*key)}", moment)
        return moment

    def check_shapes(self, shapes: Mapping[ProjectionKey, tuple[int, ...]]) -> None:
        """Check that every projection has a moment of its input's size.

        Args:
            shapes: Shape ``(out, in)`` of each projection that will need one.

        Raises:
            CheckpointError: Naming the projection whose moment is missing or of
                another size.
        """
        for key, shape in shapes.items():
            wanted = InputKey(key.layer, input_of(key.family))
            found = self.size(wanted) if wanted in self._infos else None
            if found != shape[1]:
                raise CheckpointError(
                    f"{self.path}: {moment_name(*wanted)}",
                    expected=f"shape {[shape[1], shape[1]]}, for"
                    f" {projection_name(*key)}",
                    found="no such tensor" if found is None else f"{[found, found]}",
                    hint="Were these statistics collected on this model?",
                )

    def check_model(self, model: SourceModel) -> None:
        """Check that a checkpoint is what the statistics were collected on.

        Raises:
            CheckpointError: If its weights are others.
        """
        if not self.model.is_same_as(model):
            raise _another_model(str(self.path), self.model, model)


class Accumulator:
    """Sums second moments block by block.

    A block's product is formed in float32 and added to a float64 sum: what rounds is
    one block's sum, not the whole text's.
    """

    def __init__(self) -> None:
        self._sums: dict[InputKey, npt.NDArray[np.float64]] = {}
        self._tokens: dict[InputKey, int] = {}

    def add(self, key: InputKey, block: Array) -> None:
        """Count some tokens' inputs in.

        Args:
            key: Which input.
            block: ``[tokens, in]``; computed with in float32.

        Raises:
            CheckpointError: If it is no matrix, its width is not that of the blocks
                before it, or it is not finite.
        """
        name = moment_name(*key)
        width = self._sums[key].shape[0] if key in self._sums else None
        if block.ndim != 2 or (width is not None and block.shape[1] != width):  # noqa: PLR2004
            raise CheckpointError(
                name,
                expected=f"a block [tokens, {width or 'in'}]",
                found=f"shape {list(block.shape)}",
            )
        x = np.asarray(block, dtype=np.float32)
        product = x.T @ x
        if not np.isfinite(product).all():
            raise CheckpointError(
                name,
                expected="finite activations, with finite squares",
                found="a NaN or an infinity",
            )
        if width is None:
            self._sums[key] = product.astype(np.float64)
        else:
            self._sums[key] += product
        self._tokens[key] = self._tokens.get(key, 0) + x.shape[0]

    def write(
        self, path: Path, model: SourceModel, texts: Sequence[CalibrationText]
    ) -> None:
        """Write the means to a statistics file, all or nothing.

        Raises:
            CheckpointError: If nothing was added, or the file cannot be written.
        """
        if not self._sums:
            raise CheckpointError(
                str(path), expected="statistics of some tokens", found="of none"
            )
        sizes = {key: total.shape[0] for key, total in self._sums.items()}
        with _moments_file(path, model, texts, self._tokens, sizes) as file:
            for key, total in self._sums.items():
                mean = (total / max(self._tokens[key], 1)).astype(np.float32)
                file.write(moment_name(*key), _symmetric(mean))


def input_of(family: str) -> str:
    """Return which of `INPUTS` a family of projections is applied to."""
    return _INPUT_OF[family]


def moment_name(layer: int, input_name: str) -> str:
    """Return the name of a second moment's tensor ``[in, in]``."""
    return f"layers.{layer}.{input_name}.moment"


def describe_source(checkpoint: Checkpoint) -> SourceModel:
    """Hash a checkpoint's config and weights; this reads every shard.

    Raises:
        CheckpointError: If a file cannot be read.
    """
    try:
        return SourceModel(
            checkpoint.path.resolve().name,
            "sha256:" + sha256(checkpoint.path / CONFIG_NAME),
            {shard.name: "sha256:" + sha256(shard) for shard in checkpoint.shards},
        )
    except OSError as error:
        raise CheckpointError(
            str(checkpoint.path), expected="readable files", found=str(error)
        ) from error


def open_statistics(path: Path) -> Statistics:
    """Open a statistics file: its header is read and checked, and no moment.

    Raises:
        CheckpointError: If it is missing, no statistics file, of a newer format, or
            its header contradicts itself.
    """
    if not path.is_file():
        raise CheckpointError(
            str(path),
            expected="a statistics file",
            found="a directory" if path.is_dir() else "nothing",
            hint="`attnquant calibrate` makes one.",
        )
    infos = read_header(path)
    metadata = _read_metadata(path)
    version = metadata.get(_FORMAT_KEY)
    if version is None:
        raise CheckpointError(
            str(path),
            expected="a statistics file",
            found="a safetensors file of something else",
            hint="`attnquant calibrate` makes one.",
        )
    if version != str(FORMAT_VERSION):
        raise CheckpointError(
            f"{path}: {_FORMAT_KEY}",
            expected=f"format {FORMAT_VERSION}",
            found=version,
            hint="Upgrade attnquant-core to read newer statistics.",
        )
    try:
        model, texts, tokens = _parse_metadata(metadata)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: metadata",
            expected=f"the fields of format {FORMAT_VERSION}",
            found=f"{type(error).__name__}: {error}",
        ) from error
    _check_header(path, infos, tokens)
    by_key = {key: infos[moment_name(*key)] for key in tokens}
    return Statistics(path, model, texts, tokens, by_key)


def merge_statistics(parts: Sequence[Statistics], path: Path) -> None:
    """Write the statistics of several texts as if collected in one go.

    Each moment is the mean of the parts' moments, weighted by their tokens and formed
    in float64. One input's moments are read at a time.

    Raises:
        CheckpointError: If there are no parts, they are of different models or have
            moments of different inputs, or the file cannot be written.
    """
    if not parts:
        raise CheckpointError(str(path), expected="statistics to merge", found="none")
    first, *others = parts
    for part in others:
        if not part.model.is_same_as(first.model):
            raise _another_model(str(part.path), part.model, first.model)
        sizes = {key: part.size(key) for key in part.tokens}
        if sizes != {key: first.size(key) for key in first.tokens}:
            raise CheckpointError(
                str(part.path),
                expected=f"moments of the same inputs as in {first.path}",
                found="others",
            )
    tokens = {key: sum(part.tokens[key] for part in parts) for key in first.tokens}
    sizes = {key: first.size(key) for key in tokens}
    texts = [text for part in parts for text in part.texts]
    with _moments_file(path, first.model, texts, tokens, sizes) as file:
        for key, size in sizes.items():
            total = np.zeros((size, size))
            for part in parts:
                total += part.moment(key).astype(np.float64) * part.tokens[key]
            mean = (total / max(tokens[key], 1)).astype(np.float32)
            file.write(moment_name(*key), mean)


@contextmanager
def _moments_file(
    path: Path,
    model: SourceModel,
    texts: Sequence[CalibrationText],
    tokens: Mapping[InputKey, int],
    sizes: Mapping[InputKey, int],
) -> Iterator[TensorFile]:
    """Give a hidden sibling to write moments into; put it in place if all is well."""
    specs = {moment_name(*key): (FLOAT32, (size, size)) for key, size in sizes.items()}
    hidden = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        hidden = Path(name)
        os.close(handle)
        with TensorFile(hidden, specs, _metadata(model, texts, tokens)) as file:
            yield file
        hidden.chmod(0o644)
        hidden.replace(path)
    except OSError as error:
        raise CheckpointError(
            str(path), expected="to write statistics here", found=str(error)
        ) from error
    finally:
        if hidden is not None:
            hidden.unlink(missing_ok=True)


def _metadata(
    model: SourceModel,
    texts: Sequence[CalibrationText],
    tokens: Mapping[InputKey, int],
) -> dict[str, str]:
    return {
        _FORMAT_KEY: str(FORMAT_VERSION),
        "model": json.dumps(
            {
                "name": model.name,
                "config": model.config,
                "shards": dict(sorted(model.shards.items())),
            }
        ),
        "texts": json.dumps(
            [
                {"name": text.name, "sha256": text.sha256, "tokens": text.tokens}
                for text in texts
            ]
        ),
        "tokens": json.dumps(
            {moment_name(*key): count for key, count in sorted(tokens.items())}
        ),
    }


def _read_metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, framework="np") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _parse_metadata(
    metadata: Mapping[str, str],
) -> tuple[SourceModel, tuple[CalibrationText, ...], dict[InputKey, int]]:
    model = json.loads(metadata["model"])
    shards = {str(file): str(digest) for file, digest in model["shards"].items()}
    texts = tuple(
        CalibrationText(str(text["name"]), str(text["sha256"]), int(text["tokens"]))
        for text in json.loads(metadata["texts"])
    )
    tokens = {
        _parse_name(name): int(count)
        for name, count in json.loads(metadata["tokens"]).items()
    }
    if negative := [key for key, count in tokens.items() if count < 0]:
        msg = f"a negative number of tokens for {moment_name(*negative[0])}"
        raise ValueError(msg)
    source = SourceModel(str(model["name"]), str(model["config"]), shards)
    return source, texts, tokens


def _parse_name(name: str) -> InputKey:
    _, layer, input_name, _ = name.split(".")
    key = InputKey(int(layer), input_name)
    if input_name not in INPUTS or moment_name(*key) != name:
        msg = f"{name} is the name of no moment"
        raise ValueError(msg)
    return key


def _check_header(
    path: Path, infos: Mapping[str, TensorInfo], tokens: Mapping[InputKey, int]
) -> None:
    expected = {moment_name(*key) for key in tokens}
    if unlike := sorted(expected ^ infos.keys()):
        raise CheckpointError(
            f"{path}: {unlike[0]}",
            expected="a tensor and its number of tokens",
            found="only one of the two",
        )
    for name, info in infos.items():
        square = len(info.shape) == 2 and info.shape[0] == info.shape[1] > 0  # noqa: PLR2004
        if not square or info.dtype != FLOAT32:
            raise CheckpointError(
                f"{path}: {name}",
                expected="a square float32 matrix",
                found=f"{info.dtype} {list(info.shape)}",
            )


def _check_moment(name: str, moment: Moment) -> None:
    """Check what every second moment obeys, at the cost of one pass over it.

    Positive semidefiniteness itself would take a factorisation. Its 2 by 2 minors are
    checked instead: ``C_ij² ≤ C_ii·C_jj`` (Cauchy and Schwarz).
    """
    if found := _fault(moment):
        raise CheckpointError(
            name, expected="a finite, symmetric, semidefinite matrix", found=found
        )


def _fault(moment: Moment) -> str | None:
    diagonal = np.diagonal(moment)
    if not np.isfinite(diagonal).all():
        return "a NaN or an infinity"
    if (diagonal < 0).any():
        return "a negative diagonal entry"
    lengths = np.sqrt(diagonal)
    slack = np.float32(_ROUNDING) * diagonal.max()
    starts = range(0, len(moment), _TILE)
    for row, column in ((i, j) for i in starts for j in starts if j <= i):
        # A tile and its mirror image stay in the processor's cache.
        rows, columns = slice(row, row + _TILE), slice(column, column + _TILE)
        tile, mirror = moment[rows, columns], moment[columns, rows].T
        limit = np.outer(lengths[rows], lengths[columns]) + slack
        # Neither comparison holds for a NaN.
        within = (np.abs(tile) <= limit).all()
        if within and np.array_equal(tile, mirror):
            continue
        if not (np.isfinite(tile).all() and np.isfinite(mirror).all()):
            return "a NaN or an infinity"
        if within:
            return "an asymmetric one"
        return "an entry larger than its row and column allow"
    return None


def _symmetric(matrix: Moment) -> Moment:
    # BLAS need not give x.T @ x the same bits on both sides of the diagonal.
    lower = np.tril(matrix)
    return lower + np.tril(matrix, -1).T


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        str(path), expected="a whole safetensors file", found=str(error)
    )


def _another_model(
    subject: str, expected: SourceModel, found: SourceModel
) -> CheckpointError:
    return CheckpointError(
        subject,
        expected=f"statistics of {found.name}, with the same weights",
        found=f"those of {expected.name}",
        hint="Statistics hold for the weights they were collected on;"
        " `attnquant calibrate` makes new ones.",
    )
