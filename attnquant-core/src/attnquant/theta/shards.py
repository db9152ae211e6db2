"""The weight files of a bundle: which tensor is in which, and writing in any order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from attnquant.theta.dtypes import Array
from attnquant.theta.tensor_file import TensorFile, TensorSpec, spec_bytes


def assign_shards(
    specs: Mapping[str, TensorSpec], shard_bytes: int
) -> dict[str, list[str]]:
    """Return which tensors each weight file holds, by file name.

    A file ends where one tensor more would make its tensors larger than `shard_bytes`.

    Args:
        specs: Dtype and shape of each tensor, in the order of the files.
        shard_bytes: Largest size of a file's tensors, unless one alone is larger.
    """
    groups: list[list[str]] = []
    size = 0
    for name, spec in specs.items():
        if not groups or size + spec_bytes(spec) > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += spec_bytes(spec)
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


class ShardWriter:
    """Writes tensors, in any order, into the weight files they are assigned to.

    Args:
        directory: Where the files are, or are to be. What files of the same contents
            hold already is kept.
        specs: Dtype and shape of each tensor.
        shard_bytes: As for `assign_shards`.
    """

    def __init__(
        self, directory: Path, specs: Mapping[str, TensorSpec], shard_bytes: int
    ) -> None:
        self._shards = assign_shards(specs, shard_bytes)
        self._file_of: dict[str, TensorFile] = {}
        self._total = sum(spec_bytes(spec) for spec in specs.values())
        with ExitStack() as stack:
            for shard, names in self._shards.items():
                own = {name: specs[name] for name in names}
                file = stack.enter_context(
                    TensorFile(directory / shard, own, {"format": "pt"})
                )
                self._file_of.update(dict.fromkeys(names, file))
            self._stack = stack.pop_all()

    def write(self, name: str, array: Array, row: int = 0) -> None:
        """Write a tensor, or some rows of one; see `TensorFile.write`."""
        self._file_of[name].write(name, array, row)

    def flush(self, names: Iterable[str]) -> None:
        """Wait until what was written of some tensors is on the disk."""
        for file in {self._file_of[name] for name in names}:
            file.flush()

    def index(self) -> dict[str, object]:
        """Return the index of the files, in Hugging Face's form."""
        weight_map = {
            name: shard for shard, names in self._shards.items() for name in names
        }
        return {
            "metadata": {"total_size": self._total},
            "weight_map": dict(sorted(weight_map.items())),
        }

    def __enter__(self) -> Self:
        """Give the writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Flush if all went well, and close."""
        self._stack.__exit__(kind, error, trace)
