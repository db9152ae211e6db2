"""Other software on the same weights, for the benchmark of serving; all optional.

llama.cpp comes as `xllamacpp` and torch as `torch` from PyPI. Neither belongs to the
development set-up: what cannot be imported is left out of the benchmark.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import build_gemma3_270m as gemma
from attnquant.theta.checkpoint import open_checkpoint

GGUF_TYPES = {
    "F32": gguf.GGMLQuantizationType.F32,
    "BF16": gguf.GGMLQuantizationType.BF16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
}
TORCH_DTYPES = ("float32", "bfloat16")

_WRITTEN_ANEW = {"general.architecture", "general.file_type"}


def has_llama_cpp() -> bool:
    """Return whether llama.cpp can be imported."""
    return find_spec("xllamacpp") is not None


def has_torch() -> bool:
    """Return whether transformers' models can run."""
    return find_spec("torch") is not None and find_spec("transformers") is not None


def make_gguf(checkpoint: Path, kind: str, out: Path) -> Path:
    """Write the checkpoint's weights as a GGUF, unless that was done before.

    Metadata and tokenizer are those of the GGUF that the checkpoint was built from.

    Args:
        checkpoint: What `build_gemma3_270m` made.
        kind: A key of `GGUF_TYPES`: what matrices are stored in; vectors are float32.
        out: The folder it goes into.
    """
    path = out / f"{checkpoint.name}-{kind}.gguf"
    if path.exists():
        return path
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        original = Path(folder) / "source.gguf"
        gemma.assemble(gemma.import_package(), original)
        partial = Path(folder) / path.name
        _write_gguf(gguf.GGUFReader(original), checkpoint, kind, partial)
        partial.replace(path)
    return path


def _write_gguf(
    original: gguf.GGUFReader, checkpoint: Path, kind: str, path: Path
) -> None:
    architecture = str(original.fields["general.architecture"].contents())
    weights = open_checkpoint(checkpoint).tensors
    with closing(gguf.GGUFWriter(path, architecture)) as writer:
        for key, field in original.fields.items():
            if not key.startswith("GGUF.") and key not in _WRITTEN_ANEW:
                inner = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(key, field.contents(), field.types[0], inner)
        for tensor in original.tensors:
            name = str(gemma.checkpoint_name(tensor.name))
            array = np.asarray(weights[name]).astype(np.float32)
            if gemma.is_norm(name):
                # llama.cpp multiplies by the weight alone, Gemma by one plus it.
                array += np.float32(1)
            stored = GGUF_TYPES[kind if array.ndim > 1 else "F32"]
            data = gguf.quantize(array, stored)
            writer.add_tensor(tensor.name, data, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


class LlamaCpp:
    """llama.cpp's server in this process, without HTTP, on a GGUF."""

    def __init__(self, path: Path, *, requests: int, length: int, threads: int) -> None:
        """Load.

        Args:
            path: A GGUF.
            requests: How many are served at once at most.
            length: How many tokens each may have.
            threads: How many compute.
        """
        # Not a plain import: mypy would ask for it where it is not installed.
        xllamacpp: Any = import_module("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel = requests
        params.n_ctx = requests * length
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        # What is asked for is what runs, and each prompt is computed anew.
        params.fit_params = False
        params.cache_ram_mib = 0
        params.verbosity = 0
        self._server = xllamacpp.Server(params)

    def steps(
        self, prompts: Sequence[Sequence[int]], tokens: int
    ) -> tuple[float, float]:
        """Run prompts together; see `bench_serving.Runner`."""
        # One slot's times stand for all: short prompts go through in one batch, and
        # from then on every slot is in every step.
        timings = self._complete(prompts, tokens)["timings"]
        # From the first token, which the prompt gave, to the last.
        step = timings["predicted_ms"] / 1e3 / max(tokens - 1, 1)
        return timings["prompt_ms"] / 1e3, step

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Continue one prompt."""
        # Tokens come only with their probabilities.
        answer = self._complete([prompt], tokens, logprobs=1)
        content = answer["choices"][0]["logprobs"]["content"]
        return [int(token["id"]) for token in content]

    def _complete(
        self, prompts: Sequence[Sequence[int]], tokens: int, **options: object
    ) -> dict[str, Any]:
        answer: dict[str, Any] = self._server.handle_completions(
            {
                "prompt": [list(prompt) for prompt in prompts],
                "max_tokens": tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
                **options,
            }
        )
        # Of several prompts, the counts are those of one.
        choices = len(answer.get("choices", []))
        made = answer.get("timings", {}).get("predicted_n")
        if (choices, made) != (len(prompts), tokens):
            raise RuntimeError(
                f"llama.cpp was asked for {len(prompts)} times {tokens} tokens, and"
                f" answered {answer}"
            )
        return answer


class Transformers:
    """transformers' own model on torch."""

    def __init__(self, path: Path, *, dtype: str, threads: int) -> None:
        """Load.

        Args:
            path: A checkpoint.
            dtype: What it is stored and computed in.
            threads: How many compute.
        """
        torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        torch.set_num_threads(threads)
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype)
        ).eval()

    def steps(
        self, prompts: Sequence[Sequence[int]], tokens: int
    ) -> tuple[float, float]:
        """Run prompts of one length together; see `bench_serving.Runner`."""
        times, _ = self._generate(prompts, tokens)
        return times[0], sum(times[1:]) / max(tokens - 1, 1)

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Continue one prompt."""
        return self._generate([prompt], tokens)[1]

    def _generate(
        self, prompts: Sequence[Sequence[int]], tokens: int
    ) -> tuple[list[float], list[int]]:
        times, first_row, past = [], [], None
        with self._torch.inference_mode():
            ids = self._torch.tensor([list(prompt) for prompt in prompts])
            for _ in range(tokens):
                started = time.perf_counter()
                out = self._model(ids, past_key_values=past, logits_to_keep=1)
                past, ids = out.past_key_values, out.logits[:, -1].argmax(-1)[:, None]
                times.append(time.perf_counter() - started)
                first_row.append(int(ids[0, 0]))
        return times, first_row
