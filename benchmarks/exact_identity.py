"""Whether `exact` generates the model's tokens: greedy tokens of policy `exact` against `full`'s and HF eager's, one by one.

    python -m benchmarks.exact_identity                        # 200 held-out prompts x 128 tokens, batch 1 and 8, layerskip
    python -m benchmarks.exact_identity --models layerskip,stock --prompts 40 --tokens 64

Prompts are windows of 64 tokens from the held-out files of examples/demo_model/held_out.txt, several windows of most files
(``--data library``: as many different files). Both drafters are on. At batch 8 all prompts go through 8 slots, so sequences
join and leave at different steps. Two correct programs may differ where two logits are nearly equal: the first difference of
every text is listed with eager's gap between the two tokens, and explained when that is under 1e-4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from tide_bench.report import Report
from tide_bench.text_comparison import first_difference, identical_share
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

from benchmarks.held_out import SOURCES, Prompt, held_out_prompts
from benchmarks.models.calibrated_bundles import calibrated_bundles
from benchmarks.models.demo import DEMO_MODELS
from benchmarks.models.eager_reference import NEAR_TIE, EagerReference
from benchmarks.policies_cpu import CACHE, PROMPT_TOKENS

MODELS = ("layerskip", "stock")
PAIRS = {  # result name → the two that are compared
    "identical_pct": ("exact", "full"),
    "identical_to_eager_pct": ("exact", "eager"),
    "full_identical_to_eager_pct": ("full", "eager"),
}

console = Console(width=max(110, Console().width))
Texts = list[list[int]]  # [prompts][tokens]


@dataclass(frozen=True)
class Difference:
    """Where a text first differs from a reference; ``gap``: between the two tokens' logits, in eager."""

    file: str
    offset: int
    position: int
    token: int
    expected: int
    gap: float

    @property
    def explained(self) -> bool:
        return self.gap < NEAR_TIE


def generate(bundle: Path, policy: str, batch: int, prompts: Sequence[Prompt], tokens: int) -> Texts:
    """Continuations by one policy; ``batch`` slots for all prompts."""
    options = EngineOptions(policy=policy, max_batch=batch, threads=ThreadOptions(shared=True), verify=False)
    with Engine.load(bundle, options) as engine:
        rows = engine.generate([p.ids for p in prompts], GenerationParams(max_new_tokens=tokens, ignore_eos=True))
    return [list(row.token_ids) for row in rows]


def differences(prompts: Sequence[Prompt], texts: Texts, references: Texts, eager: EagerReference) -> list[Difference]:
    """The first difference of every text that has one."""
    found = []
    for prompt, text, reference in zip(prompts, texts, references, strict=True):
        place = first_difference(text, reference)
        if place is not None:
            gap = eager.gap([*prompt.ids, *reference[:place]], text[place], reference[place])
            found.append(Difference(prompt.file, prompt.offset, place, text[place], reference[place], gap))
    return found


def compare(report: Report, model: str, bundle: Path, batches: Sequence[int], prompts: Sequence[Prompt], tokens: int) -> int:
    """All comparisons on one model; returns how many texts differ without an explanation."""
    with console.status(f"{model}: HF eager"):
        eager = EagerReference(DEMO_MODELS / model)
        texts = {"eager": eager.continuations([p.ids for p in prompts], tokens)}
    table = Table("batch", "texts", "against", "identical tokens", "texts that differ", "unexplained", title=model)
    listed, unexplained = [], 0
    for batch in batches:
        for policy in ("exact", "full"):
            with console.status(f"{model}: {policy}, batch {batch}"):
                texts[policy] = generate(bundle, policy, batch, prompts, tokens)
        for name, (own, other) in PAIRS.items():
            found = differences(prompts, texts[own], texts[other], eager)
            odd = sum(not difference.explained for difference in found)
            share = 100 * identical_share(texts[own], texts[other])
            report.add(f"{_prefix(model)}{name}_b{batch}", share)
            if name == "identical_pct":  # a RESULT line's four digits would round a few of them away
                report.add(f"{_prefix(model)}differing_tokens_b{batch}", round((1 - share / 100) * len(prompts) * tokens))
            table.add_row(str(batch), own, other, f"{share:.3f}%", str(len(found)), str(odd))
            listed += [(batch, own, other, difference) for difference in found]
            unexplained += odd
    console.print(table)
    _list(report, model, listed)
    return unexplained


def _list(report: Report, model: str, listed: Sequence[tuple[int, str, str, Difference]]) -> None:
    for batch, own, other, d in listed:
        why = "a near tie" if d.explained else "UNEXPLAINED"
        console.print(
            f"{model}, batch {batch}, {d.file} from token {d.offset}, new token {d.position}: {own} has {d.token}, {other} "
            f"{d.expected}; eager's logits are {d.gap:.1e} apart: {why}",
            markup=False,
        )
        report.rows.append({"model": model, "batch": batch, "texts": own, "against": other, **vars(d), "explained": d.explained})


def _prefix(model: str) -> str:
    return "" if model == MODELS[0] else f"{model}_"


def main(
    models: Annotated[str, typer.Option(help=f"Models, of {','.join(MODELS)}.")] = MODELS[0],
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8",
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts of 64 tokens.")] = 200,
    tokens: Annotated[int, typer.Option(min=2, help="Greedy tokens of each.")] = 128,
    data: Annotated[str, typer.Option(help=f"Where the prompts come from, of {','.join(SOURCES)}.")] = "demo",
    bundles: Annotated[Path | None, typer.Option(help="Take MODEL_1 from this folder; do not calibrate.")] = None,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Compare the tokens of `exact`, `full` and HF eager."""
    windows, batches = held_out_prompts(prompts, PROMPT_TOKENS, data), [int(size) for size in batch.split(",")]
    report = Report("exact_identity", models=models, batch=batch, prompts=prompts, tokens=tokens, data=data)
    report.settings["files"] = len({window.file for window in windows})
    console.print(f"{prompts} prompts of {PROMPT_TOKENS} tokens from {report.settings['files']} held-out files")
    unexplained = 0
    for model in models.split(","):
        bundle = bundles / f"{model}_1" if bundles else calibrated_bundles(model, cache)[1]
        unexplained += compare(report, model, bundle, batches, windows, tokens)
    report.add("unexplained_differences", unexplained)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
