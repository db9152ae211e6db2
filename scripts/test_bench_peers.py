"""Tests of the weights that the benchmark gives to llama.cpp."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

# scripts/ is no package, and pytest's importlib mode leaves it off the path.
sys.path.insert(0, str(Path(__file__).parent))

import bench_peers as peers
import build_gemma3_270m as gemma
from test_build_gemma3_270m import tiny_arrays, tiny_metadata, write_gguf

# Of values that all kinds can hold or round: the error is relative to the largest.
ERRORS = {"F32": 0.0, "BF16": 2**-8, "Q8_0": 2**-7}


@pytest.fixture
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a tiny GGUF in place of the packaged one."""
    path = tmp_path / "original.gguf"
    write_gguf(path, tiny_metadata(), tiny_arrays())

    def assemble(_: ModuleType, target: Path) -> None:
        target.write_bytes(path.read_bytes())

    monkeypatch.setattr(gemma, "import_package", lambda: ModuleType("tiny"))
    monkeypatch.setattr(gemma, "assemble", assemble)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Write a checkpoint whose weights are not those of the GGUF."""
    path = tmp_path / "tiny"
    path.mkdir()
    weights = {
        str(gemma.checkpoint_name(name)): array[::-1].copy()
        for name, array in tiny_arrays().items()
    }
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text('{"architectures": ["Gemma3ForCausalLM"]}')
    return path


@pytest.mark.parametrize("kind", peers.GGUF_TYPES)
@pytest.mark.usefixtures("original")
def test_a_gguf_holds_the_checkpoints_weights_as_llama_cpp_has_them(
    checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    path = peers.make_gguf(checkpoint, kind, tmp_path / "out")

    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert tensors.keys() == tiny_arrays().keys()
    for name, array in tiny_arrays().items():
        expected = array[::-1] + (1 if "norm" in name else 0)
        tensor = tensors[name]
        found = gguf.dequantize(tensor.data, tensor.tensor_type)
        stored = peers.GGUF_TYPES[kind if array.ndim > 1 else "F32"]
        assert tensor.tensor_type == stored
        assert found.shape == expected.shape
        error = np.abs(found - expected).max()
        assert error <= (ERRORS[kind] if array.ndim > 1 else 0) * np.abs(expected).max()


def test_metadata_and_tokenizer_are_those_of_the_original(
    original: Path, checkpoint: Path, tmp_path: Path
) -> None:
    path = peers.make_gguf(checkpoint, "F32", tmp_path / "out")

    old, new = gguf.GGUFReader(original).fields, gguf.GGUFReader(path).fields
    names = {name for name in old if not name.startswith("GGUF.")}
    assert names - new.keys() == set()
    for name in names:
        assert new[name].types == old[name].types, name
        assert new[name].contents() == old[name].contents(), name


@pytest.mark.usefixtures("original")
def test_an_interrupted_gguf_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", fail)

    with pytest.raises(OSError, match="no space left"):
        peers.make_gguf(checkpoint, "F32", tmp_path / "out")

    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.usefixtures("original")
def test_a_gguf_that_is_there_is_used_again(checkpoint: Path, tmp_path: Path) -> None:
    path = peers.make_gguf(checkpoint, "Q8_0", tmp_path)
    written = path.stat().st_mtime_ns

    assert peers.make_gguf(checkpoint, "Q8_0", tmp_path) == path
    assert path.stat().st_mtime_ns == written
