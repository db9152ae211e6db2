"""Installed metadata: which distributions declare plugins, and what is wrong with them.

A folder on `sys.path` may hold metadata that no longer stand for anything: the empty
``*.dist-info`` that an interrupted uninstall leaves, the ``*.egg-info`` of a build of
long ago, a second version that a tool copied over the first. The standard look-up takes
the first of a name it meets. Here the best of a name is taken, and the rest reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import importlib_metadata
from importlib_metadata import Distribution, EntryPoint

from attnquant.hookspecs import ENTRY_POINT_GROUP

_OURS = "attnquant"


@dataclass(frozen=True)
class MetadataProblem:
    """Metadata that should not be where they are.

    Attributes:
        path: The folder or file.
        text: What is wrong with it, in a sentence.
        remedy: The command that mends it.
        lost: The distribution whose plugins it makes unusable, if it does.
    """

    path: str
    text: str
    remedy: str
    lost: str = ""


@dataclass(frozen=True)
class Declared:
    """An entry point in the group `attnquant.models`, and who declares it."""

    point: EntryPoint
    distribution: str
    version: str
    path: str


@dataclass(frozen=True)
class Installed:
    """What installed metadata say of plugins."""

    declared: tuple[Declared, ...]
    problems: tuple[MetadataProblem, ...]


@dataclass(frozen=True)
class _Candidate:
    """Metadata of one name, in the order of `sys.path`."""

    path: Path
    name: str
    version: str
    points: tuple[EntryPoint, ...]
    defect: str = ""

    @property
    def complete(self) -> bool:
        return bool(self.name and self.version and not self.defect)

    @property
    def is_egg(self) -> bool:
        return ".egg" in self.path.name

    @property
    def quality(self) -> tuple[bool, bool]:
        """Smaller is better: whole before incomplete, wheels before eggs."""
        return (not self.complete, self.is_egg)


def find_installed() -> Installed:
    """Read the metadata of everything that could be a plugin; imports nothing."""
    by_name: dict[str, list[_Candidate]] = {}
    for candidate in _candidates():
        by_name.setdefault(_key(candidate), []).append(candidate)
    declared: list[Declared] = []
    problems: list[MetadataProblem] = []
    for name, candidates in by_name.items():
        # A stable sort: among equals, the first on `sys.path`, which is also the one
        # whose module is imported.
        best, *others = sorted(candidates, key=lambda candidate: candidate.quality)
        told = best.name or "unknown", best.version or "unknown"
        declared += [Declared(point, *told, str(best.path)) for point in best.points]
        if not best.complete:
            problems.append(_incomplete(best, name if best.defect else ""))
        problems += [_surplus(other, best) for other in others]
    return Installed(tuple(declared), tuple(problems))


def normalised(distribution: str) -> str:
    """Return a distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _candidates() -> Iterator[_Candidate]:
    seen: set[Path] = set()
    for distribution in importlib_metadata.distributions():
        path = _path(distribution)
        # A folder that is twice on `sys.path` is no second installation.
        if path in seen:
            continue
        seen.add(path)
        if (candidate := _read(distribution, path)) is not None:
            yield candidate


def _read(distribution: Distribution, path: Path) -> _Candidate | None:
    ours = normalised(path.name).startswith(_OURS)
    try:
        points = _points(distribution)
        if not points and not ours:
            return None
        name, version = _name_and_version(distribution)
    # What these files hold is anybody's; their parser raises whatever it comes across.
    except (AttributeError, OSError, TypeError, ValueError) as error:
        if not ours:
            return None
        defect = f"metadata that cannot be read ({type(error).__name__}: {error})"
        return _Candidate(path, "", "", (), defect)
    return _Candidate(path, name, version, points)


def _path(distribution: Distribution) -> Path:
    # Finders other than the usual one may know of no path.
    path = getattr(distribution, "_path", None)
    return Path(str(path)) if path is not None else Path(f"<{id(distribution)}>")


def _points(distribution: Distribution) -> tuple[EntryPoint, ...]:
    text = distribution.read_text("entry_points.txt") or ""
    # Most distributions have none of ours: do not parse theirs.
    if ENTRY_POINT_GROUP not in text:
        return ()
    return tuple(distribution.entry_points.select(group=ENTRY_POINT_GROUP))


def _name_and_version(distribution: Distribution) -> tuple[str, str]:
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")
    head = (text or "").split("\n\n", maxsplit=1)[0]
    fields = dict(re.findall(r"^(Name|Version):\s*(\S+)\s*$", head, re.MULTILINE))
    return fields.get("Name", ""), fields.get("Version", "")


def _key(candidate: _Candidate) -> str:
    # Without a Name there is still the folder's: attnquant_x-1.0.dist-info.
    return normalised(candidate.name or candidate.path.stem.partition("-")[0])


def _incomplete(candidate: _Candidate, lost: str = "") -> MetadataProblem:
    return MetadataProblem(
        str(candidate.path),
        candidate.defect
        or "metadata without a name or a version, as an interrupted installation or"
        " removal leaves them",
        f"rm -r {candidate.path}",
        lost,
    )


def _surplus(other: _Candidate, best: _Candidate) -> MetadataProblem:
    if not other.complete:
        return _incomplete(other)
    kind = "a stale egg-info" if other.is_egg else "a second installation"
    return MetadataProblem(
        str(other.path),
        f"{kind} of {other.name} ({other.version}) beside {best.path}"
        f" ({best.version}), which is the one in use",
        f"rm -r {other.path}",
    )
