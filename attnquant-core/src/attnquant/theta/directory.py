"""A directory written as a whole: under its final name when it is finished, or never.

Everything is written into a hidden sibling that is renamed at the end. A run that is
interrupted or fails leaves nothing under the final name, and removes the sibling.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from attnquant.errors import CheckpointError, SettingError


def check_target(
    out: Path,
    source: Path,
    *,
    overwrite: bool,
    what: str,
    is_one: Callable[[Path], bool],
) -> None:
    """Refuse a place that must not be written to.

    Args:
        out: The directory to make.
        source: What it is made from, which must survive.
        overwrite: Whether a directory of the same kind may be replaced.
        what: That kind, in words.
        is_one: Tells whether a directory is of that kind.

    Raises:
        SettingError: Naming it.
    """
    if out.exists() and not (overwrite and out.is_dir()):
        raise SettingError(
            str(out),
            expected="a directory that does not exist yet",
            found="an existing one" if out.is_dir() else "a file",
            hint="Choose another; --overwrite replaces a directory.",
        )
    if source.resolve().is_relative_to(out.resolve()):
        raise SettingError(
            str(out),
            expected="a directory that does not hold the checkpoint",
            found=f"{source} in it",
        )
    if out.is_dir() and any(out.iterdir()) and not is_one(out):
        raise SettingError(
            str(out),
            expected=f"{what}, or an empty directory, to replace",
            found="a directory of something else",
            hint="Choose another, or remove it yourself.",
        )


@contextmanager
def whole_directory(out: Path, what: str) -> Iterator[Path]:
    """Give a hidden sibling to write into; put it in place if all went well.

    Args:
        out: The directory to make, or to replace.
        what: What is written, in words.

    Raises:
        CheckpointError: If it cannot be written. Nothing is left then.
    """
    # Not a link to it, which could be neither renamed away nor removed as a tree.
    target = out.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        hidden = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise _unwritable(out, what, error) from error
    try:
        yield hidden
        hidden.chmod(0o755)
        if target.exists():
            _replace_directory(target, hidden)
        else:
            hidden.rename(target)
    except (OSError, SafetensorError) as error:
        raise _unwritable(out, what, error) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _replace_directory(target: Path, new: Path) -> None:
    # os.replace cannot replace a directory that is not empty.
    old = new.with_name(new.name + ".old")
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old)


def _unwritable(out: Path, what: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        str(out),
        expected=f"to write {what} here",
        found=str(error),
        hint="Nothing was left behind; free some space or choose another place.",
    )
