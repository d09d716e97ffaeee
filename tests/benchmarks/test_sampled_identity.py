"""The figures of `benchmarks.sampled_identity`: what differs, and what speculative rejection would have accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from runtime.numpy_backend import NumpyBackend, tiny_manifest
from runtime.tiny_generation import FAR_DRAFTS, Request, exits_pay, make_row
from runtime.tiny_transformer import TinyTransformer
from tide_bench.report import Report
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.depth.exact import ExactDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.generation_params import GenerationParams
from tide_runtime.scheduling.step import run

from benchmarks.sampled_identity import Acceptance, Observer, add_results, differing_tokens

PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)
SEEDS = 300


def observed(draft: Any, head: str = "linear") -> tuple[Observer, dict[str, tuple[int, int]]]:
    """What was counted over some hundred seeds, and the drafted and accepted tokens that the sequences' stats have, by source."""
    model = TinyTransformer(seed=1, strengths=(0.5, 1.5, 1.5), vocab=4, positions=32)
    model.weights["head"] *= 0.4
    manifest = tiny_manifest(model, (1,), [ExitInfo(1, head, "max_probability", 0.0)])
    policy = ExactDepth(manifest, DepthOptions(draft=draft, draft_limit=1, tuning=FAR_DRAFTS))
    policy.costs.full = lambda rows, tokens, seq: 1.0  # type: ignore[method-assign,assignment]
    params, observer = GenerationParams(max_new_tokens=10, temperature=0.9), Observer()
    rows = [make_row(Request(PROMPT, replace(params, seed=seed), seed), manifest) for seed in range(SEEDS)]
    with observer.watching():
        list(run(exits_pay(policy), NumpyBackend(manifest, model).context(50), rows))  # type: ignore[arg-type]
    stats = {
        source: (sum(row.depth.drafted[source] for row in rows), sum(row.depth.accepted[source] for row in rows))
        for source in observer.counts
    }
    return observer, stats


@pytest.mark.parametrize("draft", ["router", "ngram", "all"])
def test_counts_are_those_of_the_sequences(draft: str) -> None:
    """Breaks: the shares are of other drafts than those that were verified."""
    observer, stats = observed(draft)
    assert {source: (count.drafted, count.accepted) for source, count in observer.counts.items()} == stats
    assert sum(count.drafted for count in observer.counts.values()) > 300


def test_certain_drafts_are_accepted_as_often_as_by_rejection() -> None:
    """Breaks: the share of speculative rejection is of other probabilities. A copied draft has probability p in both schemes."""
    count = observed("ngram")[0].counts["ngram"]
    deviation = np.sqrt(count.drafted) / 2
    assert abs(count.accepted - count.by_rejection) < 3.5 * deviation
    assert 0.1 < count.by_rejection / count.drafted < 0.9


def test_exit_drafts_are_accepted_less_often_than_by_rejection_but_within_the_bound() -> None:
    """Breaks: q is taken from other logits than the draft's. Without communication the share is at least (1 - D) / (1 + D) of
    distance D, and rejection's is 1 - D; by Jensen's inequality the bound holds for means."""
    count = observed("router")[0].counts["router"]
    rejection, own = count.by_rejection / count.drafted, count.accepted / count.drafted
    noise = 3.5 / (2 * np.sqrt(count.drafted))
    assert rejection / (2 - rejection) - noise < own < rejection + noise
    assert rejection < 0.97


def test_differences_and_shares() -> None:
    """Breaks: `sampled_differing_tokens` misses a text that is too short, or shares are of the last source only."""
    assert differing_tokens([[1, 2, 3], [4, 5]], [[1, 9, 3], [4, 5]]) == 1
    assert differing_tokens([[1, 2]], [[1, 2, 3]]) == 1
    report, texts = Report("sampled_identity"), {"full": [[1, 2]], "exact": [[1, 2]]}
    add_results(report, texts, {"ngram": Acceptance(10, 4, 5.0), "router": Acceptance(30, 20, 21.0)})
    assert report.results == {
        "drafted_tokens": 40,
        "sampled_differing_tokens": 0,
        "accepted_share": 0.6,
        "rejection_accepted_share": 0.65,
    }
    report = Report("sampled_identity")
    add_results(report, texts, {})
    assert report.results == {"drafted_tokens": 0, "sampled_differing_tokens": 0}
