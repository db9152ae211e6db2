"""`attnquant doctor`: what is installed, what is wrong with it, and what mends it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import importlib_metadata

import attnquant
from attnquant.cli.text import format_table
from attnquant.errors import AttnQuantError
from attnquant.loading import max_version, within
from attnquant.plugins import State, installed_plugins
from attnquant.registry import TESTED_MAX
from attnquant.sizes import format_bytes

if TYPE_CHECKING:
    from argparse import _SubParsersAction

INSTALL_MAX = f'pip install "max[serve]{TESTED_MAX}"'
LEAST_FREE = 2_000_000_000
"""Bytes that compiled graphs of a few models take."""


class Verdict(Enum):
    """How a check came out."""

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: What was looked at.
        verdict: Whether it is well; a note is worth knowing and no fault.
        text: What was found, in a line.
        remedy: The command or the step that mends it, or nothing.
    """

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "doctor",
        help="check the installation, and say what mends it",
        description="Check versions, plugins, leftover metadata, devices, compiler and"
        " cache folders, and run one tiny decomposed projection on MAX. Exits with 0"
        " if nothing is wrong, 1 if something is; notes are no fault.",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument(
        "--no-run", action="store_true", help="do not compile and run anything"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the findings; the exit code tells whether something is wrong."""
    # What plugins and MAX print is not part of our answer.
    with contextlib.redirect_stdout(sys.stderr):
        findings = list(examine(compiles=not options.no_run))
    if options.json:
        print(json.dumps([summary(finding) for finding in findings], indent=2))
    else:
        rows = [(f.verdict.value, f.check, f.text) for f in findings]
        print(format_table(("", "check", "found"), rows))
        for finding in findings:
            if finding.remedy:
                print(f"{finding.check}: {finding.remedy}")
    return 1 if any(f.verdict is Verdict.WRONG for f in findings) else 0


def summary(finding: Finding) -> dict[str, object]:
    """Return a finding as JSON data."""
    return {**asdict(finding), "verdict": finding.verdict.value}


def examine(*, compiles: bool) -> Iterator[Finding]:
    """Run all checks, in the order in which one rests on another.

    Args:
        compiles: Whether to run something on MAX as well.
    """
    yield _versions()
    yield _max()
    yield from _plugins()
    yield from _metadata()
    yield _cpu()
    if max_version() is not None:
        yield _guarded("gpu", _gpu)
        yield _compiler()
        yield _cache()
        if compiles:
            yield _guarded("tiny run", _tiny_run)


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except AttnQuantError as error:
        return Finding(name, Verdict.WRONG, str(error), INSTALL_MAX)
    # MAX may fail in any way where it is damaged, and that is what is looked for.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Finding(name, Verdict.WRONG, text, f"Reinstall MAX: {INSTALL_MAX}")


def _versions() -> Finding:
    text = f"attnquant-core {attnquant.__version__}, Python {platform.python_version()}"
    return Finding("attnquant", Verdict.OK, f"{text}, {sys.prefix}")


def _max() -> Finding:
    version = max_version()
    if version is None:
        text = "MAX is not installed: bundles can be made, but not served"
        return Finding("max", Verdict.NOTE, text, INSTALL_MAX)
    if not within(version, TESTED_MAX):
        text = f"{version}, and attnquant-core was tested with {TESTED_MAX}"
        return Finding("max", Verdict.WRONG, text, INSTALL_MAX)
    return Finding("max", Verdict.OK, f"{version}, tested with {TESTED_MAX}")


def _plugins() -> Iterator[Finding]:
    found = installed_plugins()
    if not found.plugins:
        yield Finding("plugins", Verdict.NOTE, "none", found.explain())
    for plugin in found.plugins:
        name = f"plugin {plugin.name}"
        if plugin.state is State.LOADED:
            supplied = ", ".join(item.name for item in plugin.architectures)
            text = f"{plugin.origin}, {supplied}, {plugin.load_seconds * 1000:.1f} ms"
            yield Finding(name, Verdict.OK, text)
        else:
            verdict = Verdict.WRONG if plugin.in_trouble else Verdict.NOTE
            yield Finding(
                name, verdict, f"{plugin.origin}, {plugin.state.value}", plugin.reason
            )
    yield Finding("plugin set", Verdict.OK, f"digest {found.digest[:12]}")


def _metadata() -> Iterator[Finding]:
    problems = installed_plugins().problems
    if not problems:
        yield Finding("metadata", Verdict.OK, "nothing stale, empty or twice")
    for problem in problems:
        text = f"{problem.path}: {problem.text}"
        yield Finding("metadata", Verdict.WRONG, text, problem.remedy)


def _cpu() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    cores = usable or os.cpu_count() or 1
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        named = [line for line in lines if line.startswith("model name")]
        model = named[0].partition(":")[2].strip() if named else model
    return Finding("cpu", Verdict.OK, f"{cores} cores, {model}")


def _gpu() -> Finding:
    from max.driver import Accelerator, accelerator_count

    count = accelerator_count()
    if not count:
        text = "none that MAX sees: serve with --devices cpu, in float32"
        return Finding("gpu", Verdict.NOTE, text)
    names = ", ".join(str(Accelerator(i)) for i in range(count))
    return Finding("gpu", Verdict.OK, f"{count}: {names}")


def _compiler() -> Finding:
    try:
        version = importlib_metadata.version("mojo-compiler")
    except importlib_metadata.PackageNotFoundError:
        text = "no Mojo compiler: kernels of attnquant-kernels cannot be built"
        return Finding("compiler", Verdict.WRONG, text, INSTALL_MAX)
    return Finding("compiler", Verdict.OK, f"Mojo {version}")


def _cache() -> Finding:
    home = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(home) if home else Path.home() / ".cache") / "modular"
    if named := os.environ.get("MODULAR_CACHE_DIR"):
        folder = Path(named)
    # The nearest folder that exists: MAX makes the rest.
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(nearest, os.W_OK):
        text = f"{folder} cannot be written: every start would compile anew"
        remedy = f"chmod u+w {nearest}, or set MODULAR_CACHE_DIR"
        return Finding("cache", Verdict.WRONG, text, remedy)
    free = shutil.disk_usage(nearest).free
    text = f"{folder}, {format_bytes(free)} free on its disk"
    if free < LEAST_FREE:
        remedy = "Free some space: attnquant cache clear --larger-than SIZE"
        return Finding("cache", Verdict.NOTE, text, remedy)
    return Finding("cache", Verdict.OK, text)


def _tiny_run() -> Finding:
    from attnquant.serving.self_check import run_tiny_projection

    started = time.perf_counter()
    apart = run_tiny_projection()
    seconds = time.perf_counter() - started
    text = f"a decomposed projection is {apart:.0e} from numpy's, in {seconds:.1f} s"
    return Finding("tiny run", Verdict.OK, text)
