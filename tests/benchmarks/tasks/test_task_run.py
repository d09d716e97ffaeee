"""How tasks are timed, and what becomes of the figures."""

from __future__ import annotations

from unittest.mock import Mock, call

import pytest
from tide_bench.report import Report

from benchmarks.tasks.__main__ import add_results
from benchmarks.tasks.task_run import Conversation, PairedBatch, PairedTask, differing_tokens, mixed_groups, peer_seconds
from benchmarks.tasks.task_set import load_tasks


def test_one_disturbed_round_does_not_count() -> None:
    """Breaks: a pause of the machine would show as a slow policy."""
    assert PairedTask("chat", "a", [1.0, 1.0, 9.0], [1.0, 1.0, 1.0]).speedup == 1.0


def test_a_peer_answers_the_same_prompts_with_as_many_tokens() -> None:
    """Breaks: a peer that stops earlier, or continues its own conversation, would be timed on other work."""
    replies = [Mock(token_ids=[1] * count) for count in (5, 1, 3)]
    peer = Mock()
    peer.generate.side_effect = [Mock(decode_s=2.0), Mock(decode_s=0.5)]
    assert peer_seconds(peer, Conversation(tuple(replies), ([7, 8], [9], [6]))) == 2.5
    assert peer.generate.call_args_list == [call([[7, 8]], 5), call([[6]], 3)]


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
    """Breaks: figures of the wrong rows, or a worst prompt of two tokens, which any pause of the machine decides."""
    report = Report("tasks")
    rows = [
        {
            "weights": weights,
            "kind": kind,
            "speedup": speedup,
            "over_peer": over_peer,
            "differing_tokens": 1,
            "tokens": 20,
            "accepted_by": {"ngram": 8},
        }
        for weights, kind, speedup, over_peer in [
            ("fp32", "chat", 1.0, None),
            ("fp32", "summary", 4.0, None),
            ("int4", "chat", 0.9, 0.5),
            ("int4", "chat", 0.9, 2.0),
            ("int4", "summary", 2.0, 4.0),
            ("source", "chat", 1.0, 1.5),
        ]
    ]
    rows.append({**rows[0], "speedup": 0.1, "tokens": 2})
    add_results(report, rows, [PairedBatch(("a",), 2.0, 1.0, 3)])
    assert report.results["auto_vs_genai_tasks"] == pytest.approx(2.0)
    assert report.results["auto_vs_genai_worst_kind"] == pytest.approx(1.0)
    assert report.results["chats_vs_llamacpp"] == pytest.approx(1.5)
    assert (report.results["worst_prompt"], report.results["int4_worst_prompt"]) == (1.0, 0.9)
    assert report.results["int4_ngram_share"] == 0.4
    assert (report.results["batch8_worst"], report.results["differing_tokens"]) == (2.0, 10.0)
