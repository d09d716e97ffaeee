"""Whether `exact` generates the model's tokens: tokens of policy `exact` against `full`'s, greedy also HF eager's, one by one.

    python -m benchmarks.exact_identity                        # 200 held-out prompts x 128 tokens, batch 1 and 8, layerskip
    python -m benchmarks.exact_identity --models layerskip,stock --prompts 40 --tokens 64
    python -m benchmarks.exact_identity --models smollm2-int4,smollm2-int8
    python -m benchmarks.exact_identity --models smollm2-fp32 --prompts 100 --batch 8 --temperature 0.7 --top-p 0.95

Prompts of the demo models are windows of 64 tokens from the held-out files of examples/demo_model/held_out.txt, several windows
of most files (``--data library``: as many different files); SmolLM2's come from the Python language reference. Both drafters are
on and draft up to 16 tokens; SmolLM2 has no calibrated exits and drafts by prompt lookup. At batch 8 all prompts go through 8
slots, so sequences join and leave at different steps. Sampled, both policies have the same seed for a prompt.

Two correct programs may differ where two logits are nearly equal: the first difference of every text is listed with eager's gap
between the two tokens, and explained when that is under 1e-4. Low-bit weights promise the same bits, so SmolLM2 is compared with
`full` alone, and no difference is explained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from tide_bench.arms.base import with_limitation
from tide_bench.arms.tide import limitation
from tide_bench.report import Report
from tide_bench.text_comparison import first_difference, identical_share
from tide_runtime import DepthOptions, Engine, EngineOptions, GenerationParams, ThreadOptions

from benchmarks.held_out import SOURCES, Prompt, held_out_prompts
from benchmarks.models.calibrated_bundles import calibrated_bundles
from benchmarks.models.demo import DEMO_MODELS
from benchmarks.models.eager_reference import NEAR_TIE, EagerReference
from benchmarks.models.gguf_files import FORMS, GGUF_MODELS, folder_of
from benchmarks.models.model_folders import CACHE

PROMPT_TOKENS, DRAFT_LIMIT = 64, 16
PAIRS = {  # result name → the two that are compared
    "identical_pct": ("exact", "full"),
    "identical_to_eager_pct": ("exact", "eager"),
    "full_identical_to_eager_pct": ("full", "eager"),
}

console = Console(width=max(110, Console().width))
Texts = list[list[int]]  # [prompts][tokens]


@dataclass(frozen=True)
class Subject:
    """A model: its bundle, made in a cache folder, and its prompts; ``eager``: its HuggingFace folder, None to leave it out."""

    bundle: Callable[[Path], Path]
    prompts: Callable[[int, str, Path], list[Prompt]]
    eager: Path | None = None


def _demo(model: str) -> Subject:
    def prompts(count: int, data: str, cache: Path) -> list[Prompt]:
        return held_out_prompts(count, PROMPT_TOKENS, data)

    return Subject(lambda cache: calibrated_bundles(model, cache)[1], prompts, DEMO_MODELS / model)


def _smollm2(form: str) -> Subject:
    """SmolLM2-135M-Instruct, its weights in a form of `benchmarks.quantised_decode`."""
    model = GGUF_MODELS["smollm2"]

    def prompts(count: int, data: str, cache: Path) -> list[Prompt]:
        windows = model.prompts(cache, count, PROMPT_TOKENS)
        return [Prompt("language reference", i * PROMPT_TOKENS, ids) for i, ids in enumerate(windows)]

    return Subject(lambda cache: folder_of(form, model, cache / "smollm2"), prompts)


SUBJECTS = {
    "layerskip": _demo("layerskip"),
    "stock": _demo("stock"),
    **{f"smollm2-{form}": _smollm2(form) for form in FORMS},
}


@dataclass(frozen=True)
class Difference:
    """Where a text first differs from a reference; ``gap``: between the two tokens' logits in eager, None without it."""

    file: str
    offset: int
    position: int
    token: int
    expected: int
    gap: float | None

    @property
    def explained(self) -> bool:
        return self.gap is not None and self.gap < NEAR_TIE


@dataclass(frozen=True)
class Written:
    """Continuations by one policy, its name as it ran, and how many drafts it made and kept."""

    title: str
    texts: Texts
    drafted: int
    accepted: int


def generate(bundle: Path, policy: str, batch: int, prompts: Sequence[Prompt], params: GenerationParams) -> Written:
    """Continue ``prompts`` in ``batch`` slots; prompt i is sampled with seed i."""
    depth = DepthOptions(draft_limit=DRAFT_LIMIT)
    options = EngineOptions(policy=policy, max_batch=batch, threads=ThreadOptions(shared=True), verify=False, depth=depth)
    with Engine.load(bundle, replace(options, max_queue=len(prompts))) as engine:
        handles = [engine.submit(p.ids, replace(params, seed=i), streamed=False) for i, p in enumerate(prompts)]
        rows = [handle.result() for handle in handles]
        title = with_limitation(policy, limitation(engine))
    drafted, accepted = (sum(sum(getattr(row.stats, name).values()) for row in rows) for name in ("drafted", "accepted"))
    return Written(title, [list(row.token_ids) for row in rows], drafted, accepted)


def differences(prompts: Sequence[Prompt], texts: Texts, references: Texts, eager: EagerReference | None) -> list[Difference]:
    """The first difference of every text that has one."""
    found = []
    for prompt, text, reference in zip(prompts, texts, references, strict=True):
        place = first_difference(text, reference)
        if place is not None:
            behind = [*prompt.ids, *reference[:place]]
            gap = eager.gap(behind, text[place], reference[place]) if eager is not None else None
            found.append(Difference(prompt.file, prompt.offset, place, text[place], reference[place], gap))
    return found


def compare(
    report: Report, model: str, bundle: Path, batches: Sequence[int], prompts: Sequence[Prompt], params: GenerationParams
) -> int:
    """All comparisons on one model; returns how many texts differ without an explanation."""
    eager, texts, tokens = None, dict[str, Texts](), params.max_new_tokens
    if params.greedy and (folder := SUBJECTS[model].eager) is not None:
        with console.status(f"{model}: HF eager"):
            eager = EagerReference(folder)
            texts["eager"] = eager.continuations([p.ids for p in prompts], tokens)
    table = Table("batch", "texts", "against", "identical tokens", "texts that differ", "unexplained", title=model)
    listed, unexplained = [], 0
    for batch in batches:
        written = {}
        for policy in ("exact", "full"):
            with console.status(f"{model}: {policy}, batch {batch}"):
                written[policy] = generate(bundle, policy, batch, prompts, params)
                texts[policy] = written[policy].texts
        exact = written["exact"]
        report.add(f"{_prefix(model)}drafted_tokens_b{batch}", exact.drafted)  # without drafts nothing is compared
        if exact.drafted:
            report.add(f"{_prefix(model)}accepted_share_b{batch}", exact.accepted / exact.drafted)
        for name, (own, other) in PAIRS.items():
            if not {own, other} <= texts.keys():
                continue
            found = differences(prompts, texts[own], texts[other], eager)
            odd = sum(not difference.explained for difference in found)
            share = 100 * identical_share(texts[own], texts[other])
            report.add(f"{_prefix(model)}{name}_b{batch}", share)
            if name == "identical_pct":  # a RESULT line's four digits would round a few of them away
                report.add(f"{_prefix(model)}differing_tokens_b{batch}", round((1 - share / 100) * len(prompts) * tokens))
            title = written[own].title if own in written else own
            table.add_row(str(batch), title, other, f"{share:.3f}%", str(len(found)), str(odd))
            listed += [(batch, own, other, difference) for difference in found]
            unexplained += odd
    console.print(table)
    _list(report, model, listed)
    return unexplained


def _list(report: Report, model: str, listed: Sequence[tuple[int, str, str, Difference]]) -> None:
    for batch, own, other, d in listed:
        why = (
            f"; eager's logits are {d.gap:.1e} apart: {'a near tie' if d.explained else 'UNEXPLAINED'}"
            if d.gap is not None
            else ""
        )
        console.print(
            f"{model}, batch {batch}, {d.file} from token {d.offset}, new token {d.position}: {own} has {d.token}, {other} "
            f"{d.expected}{why}",
            markup=False,
        )
        report.rows.append({"model": model, "batch": batch, "texts": own, "against": other, **vars(d), "explained": d.explained})


def _prefix(model: str) -> str:
    return "" if model == next(iter(SUBJECTS)) else f"{model.replace('-', '_')}_"


def main(
    models: Annotated[str, typer.Option(help=f"Models, of {','.join(SUBJECTS)}.")] = "layerskip",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of 64 tokens.")] = 200,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Sample among the likeliest tokens of this probability.")] = 1.0,
    data: Annotated[str, typer.Option(help=f"Where the demo models' prompts come from, of {','.join(SOURCES)}.")] = "demo",
    bundles: Annotated[Path | None, typer.Option(help="Take MODEL_1 from this folder; do not calibrate.")] = None,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Compare the tokens of `exact`, `full` and HF eager."""
    chosen, batches = models.split(","), [int(size) for size in batch.split(",")]
    if unknown := [model for model in chosen if model not in SUBJECTS]:
        raise typer.BadParameter(f"model {', '.join(unknown)}; choose from: {', '.join(SUBJECTS)}")
    settings = dict(models=models, batch=batch, prompts=prompts, tokens=tokens, data=data)
    report = Report("exact_identity", **settings, temperature=temperature, top_p=top_p)
    params = GenerationParams(max_new_tokens=tokens, temperature=temperature, top_p=top_p, ignore_eos=True)
    unexplained = 0
    for model in chosen:
        windows = SUBJECTS[model].prompts(prompts, data, cache)
        report.settings[f"files_{model}"] = len({window.file for window in windows})
        bundle = bundles / f"{model}_1" if bundles else SUBJECTS[model].bundle(cache)
        unexplained += compare(report, model, bundle, batches, windows, params)
    differing = [value for name, value in report.results.items() if "differing_tokens" in name]
    report.add("differing_tokens", sum(differing))
    report.add("unexplained_differences", unexplained)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
