"""Whether `exact` samples the model's tokens: sampled tokens of policy `exact` against `full`'s with the same seeds, one by one.

    python -m benchmarks.sampled_identity                                 # SmolLM2-135M-Instruct, fp32: 100 prompts x 128 tokens
    python -m benchmarks.sampled_identity --prompts 10 --new-tokens 32
    python -m benchmarks.sampled_identity --bundle BUNDLE                 # another one, for example with calibrated exits

Prompts are windows of 64 tokens of the Python language reference, in batches that are generated at once; each batch has a seed
of its own. `exact` accepts a draft when it is the token that the model's logits choose with the position's noise. The share
accepted is shown beside the share that speculative rejection (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1) would have
accepted of the same drafts, in expectation, from the model's probabilities p at each draft: p(draft) for copied ones, the sum of
min(p, q) for those that an exit drew from q. Of drafts in a row both count those in front of the first that is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import numpy as np
import tide_runtime.depth.exact as exact
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tide_bench.report import Report
from tide_bench.text_comparison import first_difference
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.depth.options import DepthOptions
from tide_runtime.drafting.verification import Draft, Logits, verify
from tide_runtime.sequence import TokenSequence

from benchmarks.decode_cpu import CACHE
from benchmarks.models.gguf_files import GGUF_MODELS, prose_windows
from benchmarks.quantised_decode import folder_of

PROMPT_TOKENS = 64

console = Console(width=max(100, Console().width))
Texts = list[list[int]]  # [prompts][tokens]


@dataclass
class Acceptance:
    """Drafts of one source: how many were verified and accepted, and how many speculative rejection accepts in expectation."""

    drafted: int = 0
    accepted: int = 0
    by_rejection: float = 0.0

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(self.drafted + other.drafted, self.accepted + other.accepted, self.by_rejection + other.by_rejection)


@dataclass
class Observer:
    """Counts what is drafted and accepted, by source, while policy `exact` generates inside `watching`."""

    counts: dict[str, Acceptance] = field(default_factory=dict)
    _exits: dict[tuple[int, int], NDArray[np.float32]] = field(default_factory=dict)  # sequence, position → logits of a draft

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wrap the verification of `exact`, and the choice of tokens: outside the former only drafts of exits name a position."""
        pick = TokenSequence.pick

        def observed(sequence: TokenSequence, logits: NDArray[np.floating], likeliest: int, seen: int | None = None) -> int:
            if seen is not None:
                self._exits[id(sequence), seen] = np.array(logits, np.float32)
            return pick(sequence, logits, likeliest, seen)

        def observed_verify(sequence: TokenSequence, drafts: Sequence[Draft], verified: Logits) -> tuple[list[int], int]:
            with patch.object(TokenSequence, "pick", pick):
                found = verify(sequence, drafts, verified)
            self._count(sequence, drafts, verified, found[1])
            return found

        with patch.object(TokenSequence, "pick", observed), patch.object(exact, "verify", observed_verify):
            yield

    def _count(self, sequence: TokenSequence, drafts: Sequence[Draft], verified: Logits, accepted: int) -> None:
        all_accepted = 1.0
        for place, draft in enumerate(drafts):
            drafter = self._exits.pop((id(sequence), sequence.num_tokens + place), None)
            all_accepted *= _acceptance(sequence, draft.token, place, verified.logits[place], drafter)
            count = self.counts.setdefault(draft.source, Acceptance())
            self.counts[draft.source] = count + Acceptance(1, int(place < accepted), all_accepted)


def _acceptance(
    sequence: TokenSequence, token: int, place: int, model: NDArray[np.floating], drafter: NDArray[np.float32] | None
) -> float:
    """Probability that speculative rejection accepts draft number ``place``, drawn from the logits ``drafter`` [V] if given."""
    seen = sequence.tokens[: sequence.num_tokens + place]
    p = sequence.sampler.distribution(np.asarray(model, np.float32), seen)
    if drafter is None:
        return float(p[token])
    return float(np.minimum(p, sequence.sampler.distribution(drafter, seen)).sum())


def smollm2_bundle(cache: Path) -> Path:
    """SmolLM2-135M-Instruct in fp32, exported where ``cache`` has none."""
    return folder_of("fp32", GGUF_MODELS["smollm2"], cache / "smollm2")


def generate(
    bundle: Path, prompts: Sequence[list[int]], params: GenerationParams, batch: int, observer: Observer
) -> dict[str, Texts]:
    """Policy → its texts; ``params.seed`` is that of the first batch, the next batches take the next seeds."""
    texts: dict[str, Texts] = {"full": [], "exact": []}
    with ExitStack() as stack:
        engines = {}
        for policy in texts:
            depth = DepthOptions(draft="all") if policy == "exact" else DepthOptions()
            options = EngineOptions(policy=policy, max_batch=batch, threads=ThreadOptions(shared=True), verify=False, depth=depth)
            engines[policy] = stack.enter_context(Engine.load(bundle, options))
        stack.enter_context(observer.watching())
        for number, begin in enumerate(track(range(0, len(prompts), batch), "full and exact", console=console)):
            for policy, engine in engines.items():
                rows = engine.generate(prompts[begin : begin + batch], replace(params, seed=(params.seed or 0) + number))
                texts[policy] += [list(row.token_ids) for row in rows]
    return texts


def differing_tokens(own: Texts, reference: Texts) -> int:
    """Places with other tokens; a place that only one of two texts has counts."""
    return sum(
        sum(a != b for a, b in zip(text, other, strict=False)) + abs(len(text) - len(other))
        for text, other in zip(own, reference, strict=True)
    )


def print_tables(texts: dict[str, Texts], counts: dict[str, Acceptance]) -> None:
    table = Table("drafts", "drafted", "accepted", "by speculative rejection", title="share of drafts that is accepted")
    for source, count in sorted(counts.items()):
        shares = (f"{count.accepted / count.drafted:.2%}", f"{count.by_rejection / count.drafted:.2%}")
        table.add_row({"ngram": "prompt lookup", "router": "exits"}[source], str(count.drafted), *shares)
    console.print(table)
    for number, (own, other) in enumerate(zip(texts["exact"], texts["full"], strict=True)):
        if (place := first_difference(own, other)) is not None:
            console.print(f"prompt {number}, new token {place}: exact and full differ", style="yellow", markup=False)


def add_results(report: Report, texts: dict[str, Texts], counts: dict[str, Acceptance]) -> None:
    """Tokens that differ, and shares of accepted drafts; the shares are left out when nothing was drafted."""
    total = sum(counts.values(), Acceptance())
    report.add("drafted_tokens", total.drafted)  # without drafts nothing is compared
    report.add("sampled_differing_tokens", differing_tokens(texts["exact"], texts["full"]))
    if total.drafted:
        report.add("accepted_share", total.accepted / total.drafted)
        report.add("rejection_accepted_share", total.by_rejection / total.drafted)


def main(
    bundle: Annotated[Path | None, typer.Option(help="Default: SmolLM2-135M-Instruct in fp32, from the cache.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help=f"Prompts of {PROMPT_TOKENS} tokens.")] = 100,
    new_tokens: Annotated[int, typer.Option(min=2, help="Sampled tokens of each.")] = 128,
    temperature: Annotated[float, typer.Option(min=1e-6, help="Of sampling.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Of sampling.")] = 0.95,
    batch: Annotated[int, typer.Option(min=1, help="Prompts that are generated at once.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of the first batch; the next batches take the next ones.")] = 0,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Compare sampled tokens of `exact` and `full`, and how many drafts are accepted."""
    folder = bundle or smollm2_bundle(cache)
    report = Report(
        "sampled_identity",
        bundle=str(bundle) if bundle else "smollm2 fp32",
        prompts=prompts,
        new_tokens=new_tokens,
        temperature=temperature,
        top_p=top_p,
        batch=batch,
        seed=seed,
    )
    windows = prose_windows(folder / "tokenizer" / "tokenizer.json", prompts, PROMPT_TOKENS)
    params = GenerationParams(max_new_tokens=new_tokens, temperature=temperature, top_p=top_p, seed=seed, ignore_eos=True)
    observer = Observer()
    texts = generate(folder, windows, params, batch, observer)
    print_tables(texts, observer.counts)
    report.rows = [{"drafts": source, **vars(count)} for source, count in sorted(observer.counts.items())]
    add_results(report, texts, observer.counts)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
