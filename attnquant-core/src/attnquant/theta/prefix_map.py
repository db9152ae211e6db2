"""Prefix maps: a checkpoint's tensor names to canonical ones, as declarative data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from attnquant.errors import CheckpointError


@dataclass(frozen=True)
class PrefixMap:
    """How one architecture's checkpoints name their tensors.

    Attributes:
        prefixes: Checkpoint prefix to canonical prefix; the longest match wins.
        ignored: Shell-style patterns of tensors that are in checkpoints but that no
            model needs, such as precomputed rotary frequencies.
    """

    prefixes: Mapping[str, str]
    ignored: tuple[str, ...] = ()

    def canonical(self, name: str) -> str | None:
        """Return the canonical name of a tensor, or None if it is ignored.

        Raises:
            CheckpointError: If no prefix matches.
        """
        if any(fnmatchcase(name, pattern) for pattern in self.ignored):
            return None
        matches = [prefix for prefix in self.prefixes if name.startswith(prefix)]
        if not matches:
            raise CheckpointError(
                name,
                expected="a tensor name beginning with one of "
                + ", ".join(repr(prefix) for prefix in self.prefixes),
                found="a name that this architecture's prefix map does not cover",
            )
        prefix = max(matches, key=len)
        return self.prefixes[prefix] + name.removeprefix(prefix)

    def rename(self, names: Iterable[str]) -> dict[str, str]:
        """Return canonical name to checkpoint name, ignored tensors left out.

        Raises:
            CheckpointError: If a name is not covered, or two become the same.
        """
        sources: dict[str, str] = {}
        for name in names:
            canonical = self.canonical(name)
            if canonical is None:
                continue
            if canonical in sources:
                raise CheckpointError(
                    name,
                    expected=f"one tensor for {canonical}",
                    found=f"{sources[canonical]} as well",
                )
            sources[canonical] = name
        return sources
