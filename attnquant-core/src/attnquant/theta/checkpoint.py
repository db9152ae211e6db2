"""Reading Hugging Face style checkpoints: a config and safetensors, lazily."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from attnquant.errors import CheckpointError
from attnquant.theta.dtypes import Array, from_safetensors

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
BUNDLE_KEY = "attnquant"
"""The key of a bundle's block in `config.json`."""

_SHARD_RE = re.compile(r".*-\d+-of-\d+\.safetensors")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is and what it is, known without reading it."""

    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Tensors(Mapping[str, Array]):
    """The tensors of some safetensors files by name, each read when asked for."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self.infos = infos

    def __getitem__(self, name: str) -> Array:
        """Read one tensor.

        Raises:
            KeyError: If there is none of that name.
            CheckpointError: If its file cannot be read.
        """
        path = self.infos[name].file
        try:
            with safe_open(path, framework="np") as file:
                array: Array = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
        return array

    def rows(self, name: str, block_bytes: int) -> Iterator[tuple[int, Array]]:
        """Read one tensor block by block: the first row of each, and its rows.

        Args:
            name: The tensor's.
            block_bytes: Size of a block; a row is never split.

        Raises:
            KeyError: If there is none of that name.
            CheckpointError: If its file cannot be read.
        """
        info = self.infos[name]
        if info.nbytes <= block_bytes or not info.shape:
            yield 0, self[name]
            return
        height = max(1, block_bytes * info.shape[0] // info.nbytes)
        for row in range(0, info.shape[0], height):
            end = min(row + height, info.shape[0])
            try:
                with safe_open(info.file, framework="np") as file:
                    block = file.get_slice(name)[row:end]
            except (SafetensorError, OSError) as error:
                raise _unreadable(info.file, error) from error
            yield row, block

    def __iter__(self) -> Iterator[str]:
        """Iterate over names, sorted."""
        return iter(sorted(self.infos))

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self.infos)


class RenamedTensors(Mapping[str, Array]):
    """The same tensors under other names."""

    def __init__(self, tensors: Tensors, sources: Mapping[str, str]) -> None:
        """Args: sources maps each new name to the old one."""
        self._tensors = tensors
        self._sources = sources
        self.infos = {new: tensors.infos[old] for new, old in sources.items()}

    def __getitem__(self, name: str) -> Array:
        """Read one tensor by its new name."""
        return self._tensors[self._sources[name]]

    def rows(self, name: str, block_bytes: int) -> Iterator[tuple[int, Array]]:
        """Read one tensor by its new name, block by block."""
        return self._tensors.rows(self._sources[name], block_bytes)

    def __iter__(self) -> Iterator[str]:
        """Iterate over new names, sorted."""
        return iter(sorted(self._sources))

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._sources)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory, opened.

    Attributes:
        path: The directory.
        config: `config.json`, whole.
        tensors: Every tensor, lazily.
        shards: The weight files.
    """

    path: Path
    config: dict[str, Any]
    tensors: Tensors
    shards: tuple[Path, ...]

    @property
    def text_config(self) -> dict[str, Any]:
        """The decoder's part of the config (nested in multimodal models)."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def architecture(self) -> str:
        """The architecture that `config.json` names.

        Raises:
            CheckpointError: If it names none.
        """
        names = self.config.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise CheckpointError(
                str(self.path / CONFIG_NAME),
                expected='"architectures" naming one',
                found=json.dumps(names),
            )
        return names[0]

    @property
    def num_layers(self) -> int:
        """The number of decoder layers.

        Raises:
            CheckpointError: If `config.json` does not say.
        """
        found = self.text_config.get("num_hidden_layers")
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise CheckpointError(
                str(self.path / CONFIG_NAME),
                expected='"num_hidden_layers", a positive integer',
                found=json.dumps(found),
            )
        return found

    @property
    def is_bundle(self) -> bool:
        """Whether this is a theta bundle."""
        return BUNDLE_KEY in self.config


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint or bundle directory and read every shard's header.

    Raises:
        CheckpointError: If the directory, its config, its index or a shard is
            missing or damaged, if a tensor is in two shards, or if index and shards
            disagree.
    """
    if not path.is_dir():
        raise CheckpointError(
            str(path),
            expected="a checkpoint directory with config.json and safetensors",
            found="a file" if path.exists() else "nothing",
        )
    config = read_json(path / CONFIG_NAME)
    shards, weight_map = _find_shards(path)
    infos: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in read_header(shard).items():
            if name in infos:
                raise CheckpointError(
                    name,
                    expected="one tensor of this name",
                    found=f"two, in {infos[name].file.name} and in {shard.name}",
                )
            infos[name] = info
    if weight_map is not None:
        _check_index(path / INDEX_NAME, weight_map, infos)
    return Checkpoint(path, config, Tensors(infos), tuple(shards))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: If the file is missing or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            str(path), expected="a JSON file", found="nothing"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            str(path), expected="a JSON file", found=str(error)
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            str(path), expected="a JSON object", found=type(content).__name__
        )
    return content


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return what a safetensors file holds, without reading tensors.

    Raises:
        CheckpointError: If it is truncated, no safetensors file, or of a dtype that
            this package does not know.
    """
    infos = {}
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping: it has no iterator)
                part = file.get_slice(name)
                dtype = from_safetensors(part.get_dtype())
                if dtype is None:
                    raise CheckpointError(
                        f"{path.name}: {name}",
                        expected="a floating-point or integer dtype",
                        found=part.get_dtype(),
                        hint="Quantised checkpoints are not supported.",
                    )
                infos[name] = TensorInfo(path, dtype, tuple(part.get_shape()))
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error
    return infos


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _find_shards(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    present = sorted(path.glob("*.safetensors"))
    if (path / INDEX_NAME).exists():
        return _indexed_shards(path, present)
    if not present:
        raise CheckpointError(str(path), expected="*.safetensors weights", found="none")
    if len(present) > 1 or _SHARD_RE.fullmatch(present[0].name):
        raise CheckpointError(
            str(path / INDEX_NAME),
            expected="an index beside sharded weights",
            found="none, but " + ", ".join(shard.name for shard in present),
            hint="Copy the index from where the checkpoint came from.",
        )
    return present, None


def _indexed_shards(
    path: Path, present: list[Path]
) -> tuple[list[Path], dict[str, str]]:
    weight_map = read_json(path / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            str(path / INDEX_NAME),
            expected='a "weight_map" from tensors to files',
            found=json.dumps(weight_map)[:60],
        )
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        # A weight map is input: it must not lead out of the checkpoint.
        if Path(name).name != name or not (path / name).is_file():
            raise CheckpointError(
                str(path / name),
                expected=f"a shard that {INDEX_NAME} names",
                found="no such file",
            )
    # Loaders disagree on which of the two wins, so neither is picked here. Weight
    # files of other names are other formats' business.
    if SINGLE_NAME not in names and path / SINGLE_NAME in present:
        raise CheckpointError(
            str(path / SINGLE_NAME),
            expected=f"only the shards that {INDEX_NAME} names",
            found="a single-file checkpoint beside them",
            hint="Remove it, or remove the index if this file is the whole model.",
        )
    return [path / name for name in names], weight_map


def _check_index(
    index: Path, weight_map: Mapping[str, str], infos: Mapping[str, TensorInfo]
) -> None:
    for name, file in weight_map.items():
        if name not in infos or infos[name].file.name != file:
            raise CheckpointError(
                name,
                expected=f"a tensor in {file}, where {index.name} says it is",
                found=f"it in {infos[name].file.name}" if name in infos else "none",
            )
    for name, info in infos.items():
        if name not in weight_map:
            raise CheckpointError(
                name,
                expected=f"only tensors that {index.name} lists",
                found=f"one more in {info.file.name}",
            )


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        str(path), expected="a whole safetensors file", found=str(error)
    )
