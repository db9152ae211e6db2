"""Tests of `build_gemma3_270m` on a Gemma 3 of one layer and thirty-odd tokens."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer  # type: ignore[import-untyped, unused-ignore]

# scripts/ is no package, and pytest's importlib mode leaves it off the path.
sys.path.insert(0, str(Path(__file__).parent))

import build_gemma3_270m as build

if TYPE_CHECKING:
    from numpy.typing import NDArray

NORMAL = gguf.TokenType.NORMAL
CONTROL = gguf.TokenType.CONTROL
USER_DEFINED = gguf.TokenType.USER_DEFINED
BYTE = gguf.TokenType.BYTE

# (token as the GGUF has it, score, type); the index is the id.
PIECES = [
    ("<pad>", -1000.0, CONTROL),
    ("<eos>", -1000.0, CONTROL),
    ("<bos>", -1000.0, CONTROL),
    ("<unk>", -1000.0, CONTROL),
    ("\n", -1000.0, USER_DEFINED),
    ("\n\n", -1000.0, USER_DEFINED),
    ("  ", -1000.0, USER_DEFINED),
    ("   ", -1000.0, USER_DEFINED),
    ("<b>", -1000.0, USER_DEFINED),
    ("<0xC3>", 0.0, BYTE),
    ("<0xA9>", 0.0, BYTE),
    ("bc", -0.0, NORMAL),
    ("ab", -1.0, NORMAL),
    ("\u2581a", -3.0, NORMAL),
    ("\u2581", -4.0, NORMAL),
    ("a", -5.0, NORMAL),
    ("b", -6.0, NORMAL),
    ("c", -7.0, NORMAL),
    ("<", -8.0, NORMAL),
    (">", -9.0, NORMAL),
]
IDS = {token: index for index, (token, _, _) in enumerate(PIECES)}
HIDDEN, FFN, HEAD_DIM = 32, 64, 32


def tiny_metadata(**changes: object) -> dict[str, object]:
    """Return the metadata of the tiny model; a change to None removes a key."""
    metadata: dict[str, object] = {
        "gemma3.context_length": 128,
        "gemma3.embedding_length": HIDDEN,
        "gemma3.block_count": 1,
        "gemma3.feed_forward_length": FFN,
        "gemma3.attention.head_count": 2,
        "gemma3.attention.head_count_kv": 1,
        "gemma3.attention.key_length": HEAD_DIM,
        "gemma3.attention.sliding_window": 16,
        "gemma3.attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
        "gemma3.rope.freq_base": 1e6,
        "tokenizer.ggml.tokens": [token for token, _, _ in PIECES],
        "tokenizer.ggml.scores": [score for _, score, _ in PIECES],
        "tokenizer.ggml.token_type": [int(kind) for _, _, kind in PIECES],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def tiny_arrays() -> dict[str, NDArray[np.float32]]:
    """Return the float32 tensors of the tiny model, under their GGUF names."""
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(PIECES), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (2 * HEAD_DIM, HIDDEN),
        "blk.0.attn_k": (HEAD_DIM, HIDDEN),
        "blk.0.attn_v": (HEAD_DIM, HIDDEN),
        "blk.0.attn_q_norm": (HEAD_DIM,),
        "blk.0.attn_k_norm": (HEAD_DIM,),
        "blk.0.attn_output": (HIDDEN, 2 * HEAD_DIM),
        "blk.0.post_attention_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (FFN, HIDDEN),
        "blk.0.ffn_up": (FFN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
        "blk.0.post_ffw_norm": (HIDDEN,),
    }
    return {
        f"{name}.weight": rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gguf(
    path: Path, metadata: dict[str, object], arrays: dict[str, NDArray[np.float32]]
) -> None:
    """Write a GGUF with matrices in Q8_0 and vectors in float32."""
    writer = gguf.GGUFWriter(path, "gemma3")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for name, array in arrays.items():
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, q8_0), raw_dtype=q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def reader_tensor(array: NDArray[np.float32], name: str = "x") -> gguf.ReaderTensor:
    """Return a float32 array as `GGUFReader` would."""
    return gguf.ReaderTensor(
        name=name,
        tensor_type=gguf.GGMLQuantizationType.F32,
        shape=np.array(array.shape[::-1], dtype=np.uint64),
        n_elements=array.size,
        n_bytes=array.nbytes,
        data_offset=0,
        data=array,
        field=gguf.ReaderField(0, name),
    )


def source_of(arrays: dict[str, NDArray[np.float32]]) -> build.Source:
    """Return tensors as an open GGUF of one layer."""
    tensors = [reader_tensor(array, name) for name, array in arrays.items()]
    return build.Source(metadata=tiny_metadata(), tensors=tensors)


def vocabulary(*pieces: tuple[str, float, int]) -> build.Vocabulary:
    """Return a vocabulary of (token, score, type)."""
    tokens, scores, types = zip(*pieces, strict=True)
    return build.Vocabulary(tokens=tokens, scores=scores, types=types)


PACKAGE_CODE = """
import shutil
from pathlib import Path
EXPECTED_SHA256 = {sha256!r}
def assemble(path):
    shutil.copyfile(Path(__file__).parent / "data" / "tiny.gguf", path)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a package with the tiny model in place of the real one."""
    root = tmp_path / "site" / build.PACKAGE
    data = root / "data"
    data.mkdir(parents=True)
    write_gguf(data / "tiny.gguf", tiny_metadata(), tiny_arrays())
    for name in build.DOCUMENTS:
        (data / name).write_text(f"the {name}")
    digest = hashlib.sha256((data / "tiny.gguf").read_bytes()).hexdigest()
    use_package(root, PACKAGE_CODE.format(sha256=digest), monkeypatch)
    return root


def use_package(root: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `root` the package that is imported next."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(root.parent)
    monkeypatch.delitem(sys.modules, build.PACKAGE, raising=False)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return a place for the checkpoint, with nothing else beside it."""
    return tmp_path / "build" / "tiny"


def fail(*_: object) -> NoReturn:
    """Stand in for a writer that runs out of disk."""
    message = "no space left"
    raise OSError(message)


# -------------------------------------------------------------------------- metadata


def test_missing_metadata_is_named() -> None:
    with pytest.raises(build.MetadataError, match=r"'gemma3\.x' is missing") as caught:
        build.read({}, "gemma3.x", int)
    assert caught.value.key == "gemma3.x"


@pytest.mark.parametrize("value", ["7", 7.0, True])
def test_metadata_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(build.MetadataError, match="expected int"):
        build.read({"k": value}, "k", int)


def test_float32_metadata_reads_as_it_was_written() -> None:
    assert build.read_float({"k": 9.999999974752427e-07}, "k") == 1e-6


# ---------------------------------------------------------------------------- config


def test_config_takes_sizes_from_the_metadata() -> None:
    config = build.model_config(tiny_metadata())

    expected = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": len(PIECES),
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "sliding_window": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    assert expected == {key: config[key] for key in expected}


def test_config_falls_back_on_what_all_gemma3_share() -> None:
    config = build.model_config(tiny_metadata())

    assert config["_sliding_window_pattern"] == 6
    assert config["sliding_window_pattern"] == 6
    assert config["rope_local_base_freq"] == 10_000.0
    assert config["query_pre_attn_scalar"] == 256


def test_config_prefers_what_the_file_states() -> None:
    metadata = tiny_metadata(
        gemma3__attention__sliding_window_pattern=2,
        gemma3__rope__freq_base_swa=500.0,
        gemma3__block_count=4,
    )

    config = build.model_config(metadata)

    assert config["_sliding_window_pattern"] == 2
    assert config["rope_local_base_freq"] == 500.0
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2


def test_every_sixth_layer_sees_everything() -> None:
    types = build.layer_types(18, 6)

    full = [i for i, kind in enumerate(types) if kind == "full_attention"]
    assert full == [5, 11, 17]


def test_chat_template_is_kept_if_there_is_one() -> None:
    assert "chat_template" not in build.tokenizer_config(tiny_metadata())

    metadata = tiny_metadata(tokenizer__chat_template="{{ messages }}")
    assert build.tokenizer_config(metadata)["chat_template"] == "{{ messages }}"


# ------------------------------------------------------------------------- tokenizer


def test_merges_are_all_cuts_by_score_then_longer_left_part() -> None:
    vocab = vocabulary(
        ("a", -10.0, NORMAL),
        ("b", -11.0, NORMAL),
        ("c", -12.0, NORMAL),
        ("abc", -2.0, NORMAL),
        ("ab", -1.0, NORMAL),
        ("bc", 0.0, NORMAL),
    )

    expected = [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]
    assert build.merges(vocab) == expected


def test_merges_into_user_defined_pieces_come_first_longest_left_part_first() -> None:
    vocab = vocabulary(
        ("__", -1000.0, USER_DEFINED),
        ("___", -1000.0, USER_DEFINED),
        ("_a", 0.0, NORMAL),
        ("_", -1.0, NORMAL),
        ("a", -2.0, NORMAL),
    )

    expected = [("__", "_"), ("_", "__"), ("_", "_"), ("_", "a")]
    assert build.merges(vocab) == expected


def test_control_and_byte_pieces_are_never_merged() -> None:
    vocab = vocabulary(
        ("<", -1.0, NORMAL),
        (">", -2.0, NORMAL),
        ("<>", 0.0, CONTROL),
        ("<>>", 0.0, NORMAL),
        (">>", 0.0, BYTE),
    )

    assert build.merges(vocab) == []


def test_only_user_defined_pieces_have_their_blanks_restored() -> None:
    metadata = tiny_metadata(
        tokenizer__ggml__tokens=["  ", " a"],
        tokenizer__ggml__scores=[0.0, 0.0],
        tokenizer__ggml__token_type=[int(USER_DEFINED), int(NORMAL)],
    )

    assert build.vocabulary(metadata).tokens == ["\u2581\u2581", " a"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Return the tokenizer of the tiny model."""
    return build.build_tokenizer(tiny_metadata())


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", []),
        ("abc", ["a", "bc"]),
        ("ab a", ["ab", "\u2581a"]),
        (" " * 5, ["   ", "  "]),
        ("a  a", ["a", "  ", "a"]),
        ("\n\n\n", ["\n\n", "\n"]),
        ("a<b>", ["a", "<b>"]),
        ("<a>", ["<", "a", ">"]),
        ("\u00e9", ["<0xC3>", "<0xA9>"]),
        ("<eos>a", ["<eos>", "a"]),
    ],
)
def test_text_is_cut_as_sentencepiece_would(
    tokenizer: Tokenizer, text: str, tokens: list[str]
) -> None:
    ids = tokenizer.encode(text).ids

    assert ids == [IDS["<bos>"], *(IDS[token] for token in tokens)]
    assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text


def test_unknown_characters_are_one_unknown_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("xyz", add_special_tokens=False).ids == [IDS["<unk>"]]


def test_only_control_tokens_are_left_out_of_decoded_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<bos><b>a\n").ids

    assert tokenizer.decode(ids, skip_special_tokens=True) == "<b>a\n"


def test_each_text_of_a_pair_is_framed() -> None:
    metadata = tiny_metadata(tokenizer__ggml__add_eos_token=True)

    encoding = build.build_tokenizer(metadata).encode("a", "b")

    assert encoding.tokens == ["<bos>", "a", "<eos>", "<bos>", "b", "<eos>"]
    assert encoding.type_ids == [0, 0, 0, 1, 1, 1]


# --------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.17.attn_q.weight", "model.layers.17.self_attn.q_proj.weight"),
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.pre_feedforward_layernorm.weight"),
        ("blk.0.attn_qkv.weight", None),
        ("blk.0.attn_q.bias", None),
        ("output.weight", None),
    ],
)
def test_names_follow_the_table(name: str, expected: str | None) -> None:
    assert build.checkpoint_name(name) == expected


def test_missing_and_unknown_tensors_are_named() -> None:
    arrays = tiny_arrays()
    arrays["output.weight"] = arrays.pop("output_norm.weight")

    with pytest.raises(build.TensorError) as caught:
        build.map_tensors(source_of(arrays))

    assert caught.value.missing == ("model.norm.weight",)
    assert caught.value.unknown == ("output.weight",)


def test_a_layer_too_many_is_unknown() -> None:
    arrays = tiny_arrays()
    arrays["blk.1.attn_q.weight"] = arrays["blk.0.attn_q.weight"]

    with pytest.raises(build.TensorError) as caught:
        build.map_tensors(source_of(arrays))

    assert caught.value.unknown == ("blk.1.attn_q.weight",)


def test_norms_and_only_norms_lose_the_one_llama_cpp_added() -> None:
    arrays = {name: np.full_like(array, 1.5) for name, array in tiny_arrays().items()}

    tensors = build.convert_tensors(source_of(arrays))

    halves = {name for name, array in tensors.items() if (array == 0.5).all()}
    kept = {name for name, array in tensors.items() if (array == 1.5).all()}
    assert halves == {name for name in tensors if "norm" in name}
    assert kept == set(tensors) - halves


def test_rounding_is_to_nearest_even() -> None:
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8], dtype=np.float32)

    result = build.to_bfloat16(reader_tensor(ties))

    assert result.dtype == ml_dtypes.bfloat16
    assert result.astype(np.float32).tolist() == [1.0, 1 + 2**-6, -1.0]


def test_offset_is_added_before_rounding() -> None:
    # 2 ** -12 is lost if 1 + 2 ** -12 is rounded to bfloat16 first.
    weights = np.array([1 + 2**-12], dtype=np.float32)

    result = build.to_bfloat16(reader_tensor(weights), offset=-1.0)

    assert result.astype(np.float32).tolist() == [2**-12]


def test_blocks_of_rows_make_up_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)
    monkeypatch.setattr(build, "BLOCK_ROWS", 3)

    result = build.to_bfloat16(reader_tensor(matrix))

    np.testing.assert_array_equal(result.astype(np.float32), matrix)


# -------------------------------------------------------------------------- building


@pytest.mark.usefixtures("package")
def test_build_writes_a_whole_checkpoint(out: Path) -> None:
    assert build.build(out)

    assert {path.name for path in out.iterdir()} == set(build.FILES)
    assert build.is_complete(out)
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert (out / "NOTICE.md").read_text() == "the NOTICE.md"
    config = json.loads((out / "config.json").read_text())
    assert config["hidden_size"] == HIDDEN
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.encode("abc").ids == [2, IDS["a"], IDS["bc"]]


@pytest.mark.usefixtures("package")
def test_built_weights_are_those_of_the_gguf(out: Path) -> None:
    build.build(out)

    tensors = load_file(out / build.WEIGHTS)
    assert tensors.keys() == build.tensor_names(layers=1)
    arrays = tiny_arrays()
    q_proj = tensors["model.layers.0.self_attn.q_proj.weight"]
    wanted = arrays["blk.0.attn_q.weight"]
    # Q8_0 steps are 1/127 of a block's largest value, bfloat16 keeps 8 bits.
    np.testing.assert_allclose(q_proj.astype(np.float32), wanted, rtol=4e-3, atol=2e-2)
    norm = tensors["model.norm.weight"].astype(np.float32)
    np.testing.assert_allclose(norm, arrays["output_norm.weight"] - 1, rtol=4e-3)
    with safe_open(out / build.WEIGHTS, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.usefixtures("package")
def test_weights_are_as_readable_as_the_other_files(out: Path) -> None:
    build.build(out)

    modes = {path.name: path.stat().st_mode for path in out.iterdir()}
    assert modes[build.WEIGHTS] == modes["config.json"]


@pytest.mark.usefixtures("package")
def test_complete_checkpoint_is_left_alone_unless_forced(out: Path) -> None:
    build.build(out)
    (out / "NOTICE.md").write_text("touched")

    assert not build.build(out)
    assert (out / "NOTICE.md").read_text() == "touched"

    assert build.build(out, force=True)
    assert (out / "NOTICE.md").read_text() == "the NOTICE.md"
    assert [path.name for path in out.parent.iterdir()] == [out.name]


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("writer", ["write_tokenizer", "write_weights", "publish"])
def test_failure_leaves_nothing_behind(
    out: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    monkeypatch.setattr(build, writer, fail)

    with pytest.raises(OSError, match="no space left"):
        build.build(out)

    assert list(out.parent.iterdir()) == []


@pytest.mark.usefixtures("package")
def test_failure_keeps_the_checkpoint_that_was_there(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.build(out)
    monkeypatch.setattr(build, "write_weights", fail)

    with pytest.raises(OSError, match="no space left"):
        build.build(out, force=True)

    assert build.is_complete(out)
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_failure_to_publish_puts_the_old_checkpoint_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("old")

    with pytest.raises(FileNotFoundError):
        build.publish(tmp_path / "never-staged", out)

    assert (out / "config.json").read_text() == "old"


@pytest.mark.usefixtures("package")
def test_another_run_that_finished_first_wins(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.build(out)
    staged = tmp_path / "staged"
    staged.mkdir()
    # As if the other run's checkpoint had appeared just after the look.
    monkeypatch.setattr(Path, "exists", lambda _: False)

    build.publish(staged, out)

    assert build.is_complete(out)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", build.FILES)
def test_checkpoint_short_of_a_file_is_not_complete(out: Path, name: str) -> None:
    build.build(out)
    (out / name).unlink()

    assert not build.is_complete(out)


@pytest.mark.usefixtures("package")
def test_cut_off_weights_are_not_complete_and_need_force(out: Path) -> None:
    build.build(out)
    weights = out / build.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1])

    with pytest.raises(build.BuildError, match="--force"):
        build.build(out)

    assert build.build(out, force=True)
    assert build.is_complete(out)


@pytest.mark.usefixtures("package")
def test_foreign_files_are_never_replaced(out: Path) -> None:
    out.mkdir(parents=True)
    (out / "thesis.tex").write_text("mine")

    with pytest.raises(build.BuildError, match=r"thesis\.tex"):
        build.build(out, force=True)

    assert (out / "thesis.tex").read_text() == "mine"


@pytest.mark.usefixtures("package")
def test_empty_directory_is_filled(out: Path) -> None:
    out.mkdir(parents=True)

    assert build.build(out)
    assert build.is_complete(out)


@pytest.mark.usefixtures("package")
def test_file_in_the_way_is_refused(out: Path) -> None:
    out.parent.mkdir()
    out.write_text("mine")

    with pytest.raises(build.BuildError, match="not a directory"):
        build.build(out, force=True)


def test_gguf_of_another_checksum_is_refused(package: Path, out: Path) -> None:
    with (package / "data" / "tiny.gguf").open("ab") as file:
        file.write(b"x")

    with pytest.raises(build.BuildError, match="sha256"):
        build.build(out)

    assert list(out.parent.iterdir()) == []


# ---------------------------------------------------------------------- command line


@pytest.mark.usefixtures("package")
def test_command_line_says_what_it_did(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build.main(["--out", str(out)]) == 0
    assert f"built {out}" in capsys.readouterr().out

    assert build.main(["--out", str(out)]) == 0
    assert "is complete" in capsys.readouterr().out


@pytest.mark.parametrize("missing", [build.PACKAGE, f"{build.PACKAGE}_part9"])
def test_missing_package_is_answered_with_the_pip_command(
    tmp_path: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missing: str,
) -> None:
    code = f"def assemble(path):\n    import {build.PACKAGE}_part9\n"
    use_package(tmp_path / "site" / build.PACKAGE, code, monkeypatch)
    # None in sys.modules makes an import fail as if nothing were installed.
    monkeypatch.setitem(sys.modules, missing, None)

    assert build.main(["--out", str(out)]) == 1

    error = capsys.readouterr().err
    assert build.PIP_COMMAND in error
    assert f"'{missing}'" in error
    assert not out.exists()


def test_broken_package_is_not_taken_for_a_missing_one(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "site" / build.PACKAGE
    use_package(root, "import no_such_module_at_all\n", monkeypatch)

    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        build.build(out)


@pytest.mark.usefixtures("package")
def test_interrupted_build_leaves_nothing_behind(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "write_weights", interrupt)

    assert build.main(["--out", str(out)]) == 130
    assert list(out.parent.iterdir()) == []
