"""Checkpoint files written tensor by tensor: one tensor is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from attnquant.theta.checkpoint import INDEX_NAME
from attnquant.theta.dtypes import Array
from attnquant.theta.shards import ShardWriter
from attnquant.theta.tensor_file import TensorSpec, spec_bytes
from attnquant.theta.writer import write_json

Read = Callable[[], Array]
"""Reads or makes one tensor."""

Progress = Callable[[str, int, int], None]
"""Called with what has just been written, the steps done, and the steps in all."""


def write_tensors(
    directory: Path,
    specs: Mapping[str, TensorSpec],
    reads: Mapping[str, Read],
    *,
    shard_bytes: int,
    progress: Progress | None = None,
) -> int:
    """Write the weights of a checkpoint, and the index of their files.

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
    with ShardWriter(directory, specs, shard_bytes) as writer:
        for done, (name, read) in enumerate(reads.items(), start=1):
            writer.write(name, read())
            if progress:
                progress(name, done, len(specs))
        write_json(directory / INDEX_NAME, writer.index())
    return sum(map(spec_bytes, specs.values()))
