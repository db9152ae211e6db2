"""Becoming `max`: what the user asked for, and what this machine needs besides."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attnquant.errors import ServingError, SettingError
from attnquant.loading import max_version
from attnquant.plugins import installed_plugins
from attnquant.settings import resolve_settings
from attnquant.theta.bundle import open_bundle
from attnquant.theta.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from argparse import _SubParsersAction

MODEL_FLAGS = ("--model", "--model-path")
ARCHITECTURES_FLAG = "--custom-architectures"
DEVICES_FLAG = "--devices"
ENCODING_FLAG = "--quantization-encoding"
CONFIG_FLAG = "--config-file"

CPU = "cpu"
CPU_ENCODING = "float32"
"""The only one that MAX computes in on a CPU."""


def add_launch_parser(
    commands: _SubParsersAction[argparse.ArgumentParser],
    command: str,
    *,
    purpose: str,
    verb: str,
) -> None:
    """Declare a command that becomes one of MAX's of the same name.

    Args:
        commands: Where it is declared.
        command: The command's name.
        purpose: What it is for, in a line.
        verb: What MAX's command does with the bundle.
    """
    parser = commands.add_parser(
        command,
        help=purpose,
        description=f"Check a bundle, print the `max {command}` command that {verb} it,"
        " and become it. `--custom-architectures attnquant` is added, and on a machine"
        " without a GPU `--devices cpu --quantization-encoding float32`; flags of your"
        f" own win. `attnquant {command} BUNDLE --help` lists those of MAX.",
    )
    parser.set_defaults(run=partial(launch, command))
    parser.add_argument(
        "--print-only",
        action="store_true",
        help="print the command and do not run it (goes before BUNDLE)",
    )
    parser.add_argument(
        "bundle",
        type=Path,
        metavar="BUNDLE",
        help="directory of the bundle, or of a checkpoint, which is then decomposed at"
        " every start",
    )
    parser.add_argument(
        "flags",
        nargs=argparse.REMAINDER,
        metavar="FLAG",
        help=f"flags of `max {command}`, handed on as they are; each wins over what"
        " would be added",
    )


def launch(command: str, options: argparse.Namespace) -> int:
    """Check a bundle, print the `max` command that runs it, and become it.

    Args:
        command: ``serve`` or ``generate``.
        options: What `add_launch_parser` declared.

    Returns:
        0 where the command is only wanted in print; else it does not return.

    Raises:
        AttnQuantError: Before MAX is started: if the directory or a setting is wrong,
            no plugin supplies the architecture, or MAX is not installed.
    """
    check_servable(options.bundle)
    words = max_command(find_max(), command, options.bundle, options.flags)
    print(shlex.join(words), file=sys.stderr)
    if not options.print_only:
        # All that is buffered would be lost with this process.
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvpe(words[0], words, os.environ)  # noqa: S606 (no shell is wanted)
    return 0


def check_servable(path: Path) -> None:
    """Refuse what MAX would fail on later, and less clearly.

    Raises:
        CheckpointError: If the directory is missing, damaged or no checkpoint.
        ArchitectureError: If no loaded plugin supplies its architecture.
        SettingError: If an environment variable does not fit it.
    """
    checkpoint = open_checkpoint(path)
    info = open_bundle(path).info if checkpoint.is_bundle else None
    installed_plugins().find(checkpoint.architecture)
    resolve_settings(checkpoint.num_layers, info)


def find_max() -> str:
    """Return the path of the `max` command.

    That beside this interpreter comes first: it has the plugins that were checked.

    Raises:
        ServingError: If MAX is not installed.
    """
    beside = Path(sys.executable).with_name("max")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("max")
    if found is None or max_version() is None:
        raise ServingError(
            "MAX",
            expected="the `max` command, which serves the model",
            found="none installed beside this interpreter or on the PATH",
            hint='Install it: pip install "attnquant-core[serving]".',
        )
    return found


def max_command(
    program: str, command: str, bundle: Path, flags: Sequence[str]
) -> list[str]:
    """Return the words of a `max` command.

    Args:
        program: The `max` program.
        command: Its command.
        bundle: What it is to run.
        flags: The user's own. Whatever they set is not set again; a configuration
            file of MAX's counts as setting device and encoding.

    Raises:
        SettingError: If they name a model as well.
    """
    for flag in MODEL_FLAGS:
        if any(_values(flags, flag)):
            raise SettingError(
                flag,
                expected=f"no such flag, since the model is {bundle}",
                found=shlex.join([flag, *_values(flags, flag)]),
            )
    added = ["--model", str(bundle)]
    if "attnquant" not in _values(flags, ARCHITECTURES_FLAG):
        # MAX takes several, and those that come later win.
        added += [ARCHITECTURES_FLAG, "attnquant"]
    if not any(_values(flags, CONFIG_FLAG)):
        added += _device_flags(flags)
    return [program, command, *added, *flags]


def _device_flags(flags: Sequence[str]) -> Iterator[str]:
    """Yield what a machine without a GPU needs, unless it is said already."""
    devices = list(_values(flags, DEVICES_FLAG))
    if not devices and not has_gpu():
        devices = [CPU]
        yield from (DEVICES_FLAG, CPU)
    on_cpu = devices[-1:] == [CPU]
    if on_cpu and not any(_values(flags, ENCODING_FLAG)):
        yield from (ENCODING_FLAG, CPU_ENCODING)


def has_gpu() -> bool:
    """Return whether MAX sees a GPU; only its driver is loaded."""
    from max.driver import accelerator_count

    return accelerator_count() > 0


def _values(flags: Sequence[str], flag: str) -> Iterator[str]:
    """Yield what a flag is set to, as ``--flag value`` or ``--flag=value``.

    MAX's command line knows no abbreviations of flags.
    """
    for index, word in enumerate(flags):
        if word == flag:
            yield flags[index + 1] if index + 1 < len(flags) else ""
        elif word.startswith(f"{flag}="):
            yield word.partition("=")[2]
