"""A directory written as a whole: under its final name when it is finished, or never.

Everything is written into a hidden sibling that is renamed at the end. A run that is
interrupted or fails leaves nothing under the final name, and removes the sibling.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
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


@contextmanager
def resumable_directory(
    out: Path, what: str, plan: Mapping[str, object]
) -> Iterator[Path]:
    """Give a hidden sibling that outlives an interruption; put it in place at the end.

    The same plan finds what it wrote before; another one begins anew, and so does the
    same one after an error.

    Args:
        out: The directory to make, or to replace.
        what: What is written, in words.
        plan: All that the contents depend on, as JSON data.

    Raises:
        SettingError: If another process is writing there.
        CheckpointError: If it cannot be written. Nothing is left then.
    """
    target = out.resolve()
    hidden = target.with_name(f".{target.name}.partial")
    try:
        hidden.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(hidden / _LOCK, out):
            try:
                _begin(hidden, json.dumps(plan, indent=1, sort_keys=True))
                yield hidden
                for name in (_LOCK, _PLAN):
                    (hidden / name).unlink()
                hidden.chmod(0o755)
                if target.exists():
                    _replace_directory(target, hidden)
                else:
                    hidden.rename(target)
            except Exception:
                # An interruption is no such exception, and leaves all as it is.
                shutil.rmtree(hidden, ignore_errors=True)
                raise
    except (OSError, SafetensorError) as error:
        raise _unwritable(out, what, error) from error


_LOCK = "lock"
_PLAN = "plan.json"


@contextmanager
def _locked(path: Path, out: Path) -> Iterator[None]:
    with path.open("w", encoding="utf-8") as file:
        try:
            # The system lets go of it when the process ends, however it ends.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingError(
                str(out),
                expected="one process that writes it",
                found="another that is at it",
            ) from None
        yield


def _begin(hidden: Path, plan: str) -> None:
    """Empty the directory, unless it was begun with the same plan."""
    path = hidden / _PLAN
    if path.is_file() and path.read_text(encoding="utf-8") == plan:
        return
    for entry in hidden.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()
    # In one step, so that half a plan is never taken for one.
    written = hidden / f"{_PLAN}.new"
    written.write_text(plan, encoding="utf-8")
    written.rename(path)


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
