"""Checkpoint files written tensor by tensor: one tensor is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from attnquant.theta.checkpoint import INDEX_NAME, SINGLE_NAME
from attnquant.theta.dtypes import Array
from attnquant.theta.tensor_file import TensorFile, TensorSpec, spec_bytes
from attnquant.theta.writer import write_json

Read = Callable[[], Array]
"""Reads or makes one tensor."""

Progress = Callable[[str, int, int], None]
"""Called with what has just been written, the steps done, and the steps in all."""

_METADATA = {"format": "pt"}
"""What transformers wants to find in a safetensors file."""


def write_tensors(
    directory: Path,
    specs: Mapping[str, TensorSpec],
    reads: Mapping[str, Read],
    *,
    shard_bytes: int,
    progress: Progress | None = None,
) -> int:
    """Write the weights of a checkpoint, with an index where there are several files.

    Args:
        directory: Where they go.
        specs: Dtype and shape of each tensor.
        reads: What gives each tensor.
        shard_bytes: Size above which the next file begins.
        progress: Called as work goes on.

    Returns:
        The size of all tensors in bytes.

    Raises:
        OSError: If a file cannot be written.
    """
    shards = split(specs, shard_bytes)
    names = (
        [SINGLE_NAME]
        if len(shards) == 1
        else [
            f"model-{number:05}-of-{len(shards):05}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
    )
    done = 0
    for file_name, members in zip(names, shards, strict=True):
        chosen = {name: specs[name] for name in members}
        with TensorFile(directory / file_name, chosen, _METADATA) as file:
            for name in members:
                file.write(name, reads[name]())
                done += 1
                if progress:
                    progress(name, done, len(specs))
    size = sum(map(spec_bytes, specs.values()))
    if len(shards) > 1:
        weight_map = {
            name: file_name
            for file_name, members in zip(names, shards, strict=True)
            for name in members
        }
        index = {
            "metadata": {"total_size": size},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_json(directory / INDEX_NAME, index)
    return size


def split(specs: Mapping[str, TensorSpec], limit: int) -> list[list[str]]:
    """Divide tensors, in order, among files of at most `limit` bytes each.

    A tensor that is larger than that has a file of its own.
    """
    shards: list[list[str]] = []
    room = 0
    for name, spec in specs.items():
        size = spec_bytes(spec)
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards
