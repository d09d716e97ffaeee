"""How often copied tokens hold, by the length of the match, and what drafting by that gains.

    python -m benchmarks.text_drafts                       # SmolLM2-135M int4: 3 minutes
    python -m benchmarks.text_drafts --weights fp32

The model writes 160 greedy tokens for each of 68 prompts: requests about the first 900 characters of topics of the Python
documentation, the topics themselves, and open questions. Then the runtime's own drafter and controller draft on these texts, with
passes priced as measured on this machine (`Backend.pass_costs`). Speedups are over one token a pass. Nothing here is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from statistics import geometric_mean
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from tide_bench.report import Report
from tide_calibrate.simulation.text_drafts import TextDrafts
from tide_calibrate.traces.trace import OwnText
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth_tuning import DepthTuning
from tide_runtime.drafting.hit_rates import USUAL_RATES
from tide_runtime.drafting.text_drafter import TextDrafter, TextPool

from benchmarks.decode_cpu import CACHE
from benchmarks.models.gguf_files import GGUF_MODELS
from benchmarks.quantised_decode import folder_of

NEW_TOKENS, CHARACTERS, TOPICS = 160, 900, 64
LEAST_TOKENS = 8  # of an output whose speedup counts: shorter ones have hardly a step
REQUESTS = (
    "Summarise the following text in a few sentences.\n\n",
    "Explain the following text to a beginner.\n\n",
    "Rewrite the following text as a list of points.\n\n",
)
QUESTIONS = (
    "What is a good plan for learning to cook?",
    "Tell me about the history of bridges.",
    "Write a short story about a lost key.",
    "Give me ten tips for saving energy at home.",
    "Write a Python function that merges two sorted lists, with tests.",
    "How do vaccines work?",
    "Write a letter of complaint to a railway.",
    "Compare tea and coffee.",
    "Write a poem about rain.",
    "List the planets with one fact each.",
    "Explain recursion with an example in Python.",
    "What should I pack for a week in the mountains?",
)


def write_texts(engine: Engine) -> list[OwnText]:
    """The model's texts, prompts included."""
    assert engine.tokenizer is not None
    prompts: list[list[int]] = []
    for number, name in enumerate(sorted(topics)[:TOPICS]):
        if len(topics[name][:CHARACTERS]) < CHARACTERS // 2:
            continue
        if number % 4 == len(REQUESTS):
            prompts.append(engine.tokenizer.encode(topics[name], add_special_tokens=False)[:150])
        else:
            prompts.append(_chat(engine, REQUESTS[number % 4] + topics[name][:CHARACTERS]))
    prompts += [_chat(engine, question) for question in QUESTIONS]
    outputs = engine.generate(prompts, GenerationParams(max_new_tokens=NEW_TOKENS))
    pairs = zip(prompts, outputs, strict=True)
    return [OwnText(np.array([*prompt, *output.token_ids]), len(prompt)) for prompt, output in pairs]


def _chat(engine: Engine, message: str) -> list[int]:
    return engine.chat_prompt([{"role": "user", "content": message}])


def hits_by_match(texts: Sequence[OwnText]) -> dict[float, tuple[int, int]]:
    """Least length of a class of `USUAL_RATES` → hits and tries of the next token."""
    found = {least: (0, 0) for least in USUAL_RATES}
    for text in texts:
        drafter = TextDrafter()
        for end in range(text.prompt, len(text.tokens)):
            guess = drafter.guess(text.tokens, end, 1)
            if guess.tokens:
                least = max(least for least in USUAL_RATES if least <= guess.matched)
                hits, tries = found[least]
                found[least] = hits + int(guess.tokens[0] == text.tokens[end]), tries + 1
    return found


def speedups(
    texts: Sequence[OwnText], pass_ms: NDArray[np.float64], tuning: DepthTuning, pool: TextPool | None = None
) -> list[float]:
    """Speedup of each text over one token a pass. With ``pool``, each output is added to it before the next text."""
    found = []
    for text in texts:
        drafts, position, ms = TextDrafts(text, pass_ms, 1.0, tuning, pool), 1, 0.0  # the prompt's pass gives the first token
        size = len(text.tokens) - text.prompt
        while position < size:
            made, right = drafts.draft(position)
            ms += pass_ms[made + 1]
            drafts.learn(position, right + 1)
            position += right + 1
        if size >= LEAST_TOKENS:
            found.append(float((size - 1) * pass_ms[1] / ms))
        if pool is not None:
            drafts.finish(pool)
    return found


def main(
    weights: Annotated[str, typer.Option(help="Of SmolLM2-135M-Instruct: int4 or fp32.")] = "int4",
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure acceptance of copied tokens, and model what the rules of text drafts gain."""
    if weights not in ("int4", "fp32"):
        raise typer.BadParameter(f"weights is {weights!r}; give int4 or fp32")
    report, console = Report("text_drafts", weights=weights, new_tokens=NEW_TOKENS), Console(width=110)
    options = EngineOptions(policy="full", max_batch=8, prefix_cache=False, threads=ThreadOptions(shared=True))
    with Engine.load(folder_of(weights, GGUF_MODELS["smollm2"], cache / "smollm2"), options) as engine:
        texts = write_texts(engine)
        costs = CostModel.of(engine.manifest, engine.backend.pass_costs)
    rates = Table("matched tokens, at least", "next tokens", "hits", "in `HitRates`", title=f"{len(texts)} texts")
    for least, (hits, tries) in hits_by_match(texts).items():
        rates.add_row(str(least), str(tries), f"{hits / tries:.2f}" if tries else "", f"{USUAL_RATES[least]:.2f}")
        report.rows.append({"matched": least, "tries": tries, "hits": hits, "usual": USUAL_RATES[least]})
    console.print(rates)
    tuning = DepthTuning()
    pass_ms = np.array([0.0, *(costs.full(1, tokens, tokens) for tokens in range(1, tuning.text_draft_limit + 2))])
    cases = {
        "default": speedups(texts, pass_ms, tuning),
        "no_ledger": speedups(texts, pass_ms, replace(tuning, loss_allowance=1e9)),
        "with_pool": speedups(texts, pass_ms, tuning, TextPool(tuning.pool_tokens)),
    }
    modelled = Table("rules", "geometric mean", "worst text", title=f"Modelled speedup, {weights}")
    for name, found in cases.items():
        modelled.add_row(name.replace("_", " "), f"{geometric_mean(found):.3f}", f"{min(found):.3f}")
        report.add(f"{name}_geomean", geometric_mean(found))
        report.add(f"{name}_worst", min(found))
    console.print(modelled)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
