"""Writing a bundle: a run that fails leaves nothing; one that is stopped, no bundle."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attnquant.errors import CheckpointError, SettingError
from attnquant.theta import writer
from attnquant.theta.bundle import open_bundle
from attnquant.theta.writer import write_bundle
from core_support.bundles import plan, write_tiny_bundle
from core_support.processes import environment, python, started
from core_support.tiny import (
    tiny_config,
    tiny_weights,
    weight_name,
    write_checkpoint,
    write_tiny_checkpoint,
)

TESTS = str(Path(__file__).parents[1])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "model")


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_nothing_left(folder: Path) -> None:
    assert entries(folder) == ["model"]


def full(*_arguments: object, **_options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "step", ["ShardWriter", "write_json", "copy_side_files", "Journal"]
)
def test_a_full_disk_leaves_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(writer, step, full)
    out = model.parent / "bundle"
    with pytest.raises(CheckpointError) as caught:
        write_bundle(plan(model), out)
    assert caught.value.subject == str(out)
    assert caught.value.expected == "to write a bundle here"
    assert "No space left on device" in caught.value.found
    assert "free some space" in caught.value.hint
    assert_nothing_left(model.parent)


LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from attnquant.errors import CheckpointError
from attnquant.theta.writer import write_bundle
from core_support.bundles import plan

ready = plan(Path(sys.argv[2]))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), int(sys.argv[4])))
try:
    write_bundle(ready, Path(sys.argv[3]))
except CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [0, 4096, 20_000])
def test_a_real_limit_on_file_sizes_leaves_nothing(model: Path, limit: int) -> None:
    out = model.parent / "bundle"
    done = python(LIMITED, TESTS, model, out, limit)
    assert done.stderr == ""
    assert done.stdout.startswith(f"{out}: expected to write a bundle here, found ")
    assert_nothing_left(model.parent)


@pytest.mark.parametrize("name", ["W0.0.q_proj", "W0.1.down_proj", "norm.weight"])
def test_an_error_on_the_way_leaves_nothing(model: Path, name: str) -> None:
    def fail(what: str, _done: int, _total: int) -> None:
        if what == name:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_bundle(plan(model), model.parent / "bundle", progress=fail)
    assert_nothing_left(model.parent)


WAITING = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from attnquant.theta.writer import write_bundle
from core_support.bundles import plan

def wait(*step):
    print("writing", flush=True)
    time.sleep(60)

write_bundle(plan(Path(sys.argv[2])), Path(sys.argv[3]), progress=wait, shard_bytes=1)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_process_leaves_no_target(model: Path, sent: signal.Signals) -> None:
    out = model.parent / "bundle"
    process, output = started(WAITING, TESTS, model, out, env=environment())
    with process:
        assert output.readline() == "writing\n"
        process.send_signal(sent)
    assert process.returncode == -sent
    assert not out.exists()
    # Nor does what is left look like a model: it is hidden, and has no config.
    assert entries(model.parent) == [".bundle.partial", "model"]
    assert not (model.parent / ".bundle.partial" / "config.json").exists()


def test_a_target_that_exists_is_not_touched(tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path)
    out = tmp_path / "bundle"
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(SettingError) as caught:
        write_bundle(plan(tmp_path / "model"), out)
    assert caught.value.subject == str(out)
    assert "does not exist yet" in caught.value.expected
    assert "--overwrite" in caught.value.hint
    assert before == {file.name: file.read_bytes() for file in out.iterdir()}


def failed_plan(folder: Path, patch: pytest.MonkeyPatch) -> None:
    def stop(*_step: object) -> None:
        raise RuntimeError

    del patch
    write_bundle(
        plan(folder / "model", blocks=1),
        folder / "bundle",
        overwrite=True,
        progress=stop,
    )


def without_space(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writer, "ShardWriter", full)
    write_bundle(plan(folder / "model", blocks=1), folder / "bundle", overwrite=True)


def without_rename(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Fail at the last moment: the old bundle is out of the way, the new one stuck."""
    rename = Path.rename

    def rename_not_into_place(self: Path, target: Path) -> Path:
        if target == folder / "bundle" and not self.name.endswith(".old"):
            full()
        return rename(self, target)

    patch.setattr(Path, "rename", rename_not_into_place)
    write_bundle(plan(folder / "model", blocks=1), folder / "bundle", overwrite=True)


@pytest.mark.parametrize("fail", [failed_plan, without_space, without_rename])
def test_overwriting_keeps_the_old_bundle_if_the_new_run_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fail: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    write_tiny_bundle(tmp_path)
    with pytest.raises((CheckpointError, RuntimeError)):
        fail(tmp_path, monkeypatch)
    assert open_bundle(tmp_path / "bundle").info.layout.shared_blocks == 2
    assert entries(tmp_path) == ["bundle", "model"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("target", ["model", ".", "model/../model", "link"])
def test_a_target_that_holds_the_checkpoint_is_refused(
    model: Path, target: str, overwrite: bool
) -> None:
    (model.parent / "link").symlink_to(model)
    out = model.parent / target
    with pytest.raises(SettingError) as caught:
        write_bundle(plan(model), out, overwrite=overwrite)
    assert caught.value.subject == str(out)
    assert entries(model) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_target_that_is_a_file_is_refused(model: Path, overwrite: bool) -> None:
    out = model.parent / "bundle"
    out.write_text("a file")
    with pytest.raises(SettingError) as caught:
        write_bundle(plan(model), out, overwrite=overwrite)
    assert caught.value.subject == str(out)
    assert out.read_text() == "a file"
    assert entries(model.parent) == ["bundle", "model"]


def test_a_target_below_a_file_is_refused(model: Path) -> None:
    out = model / "config.json" / "bundle"
    with pytest.raises(CheckpointError) as caught:
        write_bundle(plan(model), out)
    assert caught.value.subject == str(out)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["norm.weight", weight_name(3, "down_proj")])
def test_a_tensor_that_is_not_finite_leaves_nothing(
    tmp_path: Path, name: str, value: float
) -> None:
    weights = tiny_weights(4)
    weights[name].flat[1] = value
    model = write_checkpoint(tmp_path / "model", weights, tiny_config(4))
    with pytest.raises(CheckpointError) as caught:
        write_bundle(plan(model), tmp_path / "bundle")
    assert caught.value.subject == name
    assert caught.value.found.startswith(str(value))
    assert_nothing_left(tmp_path)


def test_a_shard_that_is_cut_while_it_is_read_leaves_nothing(model: Path) -> None:
    ready = plan(model)
    (model / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        write_bundle(ready, model.parent / "bundle")
    assert caught.value.subject == str(model / "model.safetensors")
    assert_nothing_left(model.parent)
