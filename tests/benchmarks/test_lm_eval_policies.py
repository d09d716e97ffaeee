"""The benchmark of policies in lm-evaluation-harness, and the tasks that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tide_runtime import ThreadOptions

from benchmarks.tasks.task_set import load_tasks

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'tide-llm[eval]'")

from tide_bench import lm_eval_model

from benchmarks.lm_eval_policies import TASKS, Case, differing, disagreement, rows_of, run_policy


def test_questions_have_one_answer_and_quote_their_passage() -> None:
    """A model would be marked down for the right answer."""
    sources = {task.id: "".join(task.turns) for kind in load_tasks() for task in kind.tasks}
    for line in (TASKS / "questions.jsonl").read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        assert item["passage"] in sources[item["source"].split()[0]]
        assert item["sentence"] in item["passage"] and len(set(item["choices"])) == 4 and 0 <= item["answer"] < 4


def test_a_bundle_is_compared_with_itself(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would need a download, or count differences that are none."""
    monkeypatch.setattr(lm_eval_model, "ThreadOptions", lambda *_, **__: ThreadOptions(1))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    case = Case("tiny", bundle, ("tide_choice",))
    full, exact = run_policy(case, "full", 2), run_policy(case, "exact", 8)
    assert [(row["metric"], row["items"], row["differing"]) for row in rows_of(case, "exact", exact, full)] == [
        ("acc", 26, 0),
        ("acc_norm", 26, 0),
    ]
    assert case.epsilon is None


def test_differences_count_items_and_documents() -> None:
    """A figure would hide a difference, or weigh long documents more than the certificate does."""
    assert differing([[(-1.5, True)], ["a"]], [[(-1.5, True)], ["a"]]) == 0
    assert differing([[(-1.5, True)], ["a"]], [[(-1.5000001, True)], ["b"]]) == 2
    assert disagreement([[1, 2, 3, 4], [5]], [[1, 2, 3, 9], [6]]) == pytest.approx((0.25 + 1) / 2)
