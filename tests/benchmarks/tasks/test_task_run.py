"""How tasks are timed, and what becomes of the figures."""

from __future__ import annotations

import pytest
from tide_bench.report import Report

from benchmarks.tasks.__main__ import add_results
from benchmarks.tasks.task_run import PairedBatch, PairedTask, differing_tokens, mixed_groups
from benchmarks.tasks.task_set import load_tasks


def test_short_and_doubtful_tasks_take_several_rounds() -> None:
    """Breaks: the worst prompt would be whichever the machine disturbed."""
    assert not PairedTask("chat", "a", [2.0], [1.0]).needs_a_round
    assert PairedTask("chat", "a", [0.1] * 4, [0.05] * 4).needs_a_round
    assert PairedTask("chat", "a", [2.0] * 2, [2.0] * 2).needs_a_round
    assert not PairedTask("chat", "a", [2.0] * 3, [2.0] * 3).needs_a_round
    assert not PairedTask("chat", "a", [0.1] * 9, [0.1] * 9).needs_a_round


def test_one_disturbed_round_does_not_count() -> None:
    """Breaks: a pause of the machine would show as a slow policy."""
    assert PairedTask("chat", "a", [1.0, 1.0, 9.0], [1.0, 1.0, 1.0]).speedup == 1.0


def test_batches_mix_the_kinds() -> None:
    """Breaks: a batch of one kind, whose texts are alike, would stand for mixed traffic."""
    groups = mixed_groups(load_tasks(), 8)
    assert len(groups) == 10
    assert all(len({kind.kind for kind, _ in group}) == 8 for group in groups)


def test_texts_differ_in_tokens_and_in_length() -> None:
    """Breaks: a text that stopped early would pass for the model's."""
    assert differing_tokens([1, 2, 3], [1, 2, 3]) == 0
    assert differing_tokens([1, 9, 3], [1, 2, 3, 4]) == 2


def test_figures_name_the_worst_prompt_and_count_every_difference() -> None:
    """Breaks: what the issue asks for would be of the wrong rows."""
    report = Report("tasks")
    rows = [
        {"weights": weights, "kind": kind, "speedup": speedup, "differing_tokens": 1, "tokens": 5, "accepted_by": {"ngram": 2}}
        for weights, kind, speedup in [("fp32", "chat", 1.0), ("fp32", "summary", 4.0), ("int4", "chat", 0.9)]
    ]
    add_results(report, rows, [PairedBatch(("a",), 2.0, 1.0, 3)])
    assert report.results["default_geomean"] == pytest.approx(2.0)
    assert (report.results["worst_prompt"], report.results["int4_worst_prompt"]) == (1.0, 0.9)
    assert report.results["ngram_share"] == 0.4
    assert (report.results["batch8_worst"], report.results["differing_tokens"]) == (2.0, 6.0)
