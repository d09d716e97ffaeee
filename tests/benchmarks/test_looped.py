"""The benchmark of looped models: its model has the size it is named for, and its figures are what they are called."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tide_bench.arms import tide
from tide_bench.report import Report
from tide_runtime import ThreadOptions
from tide_runtime.bundle.manifest import read_manifest
from transformers import AutoModelForCausalLM

from benchmarks.arms.turns import Turn
from benchmarks.looped.__main__ import add_export, add_speeds
from benchmarks.looped.demo import EXACT, EXIT, LOOPS, differing, loop_figures, run_batch
from benchmarks.looped.ouro import OURO_1B, OuroShape, with_loops, write_ouro

TINY = OuroShape(layers=2, hidden=64, heads=2, mlp=96, vocabulary=128)


def test_the_folder_loads_in_full_and_for_other_loops_has_the_same_weights(tmp_path: Path) -> None:
    """A tensor that is missing would be random in each export, and the two bundles ones of other weights."""
    write_ouro(TINY, tmp_path / "ouro")
    once = with_loops(tmp_path / "ouro", 1, tmp_path / "once")
    models = []
    for folder, loops in ((tmp_path / "ouro", 4), (once, 1)):
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        model, info = loaded
        assert model.config.total_ut_steps == loops and not any(info[key] for key in ("missing_keys", "unexpected_keys"))
        assert model.dtype == torch.bfloat16
        models.append(model)
    looped, single = (model.state_dict() for model in models)
    assert all(torch.equal(looped[name], single[name]) for name in looped)
    matrices = [weight.flatten() for weight in looped.values() if weight.shape == (64, 64)]
    assert len({weight.float().sum().item() for weight in matrices}) == len(matrices)  # equal ones would be stored once
    with safe_open(tmp_path / "ouro" / "model-00001.safetensors", "pt") as file:
        assert all(name.startswith("model.layers.0.") for name in list(file.keys()))


def test_the_large_model_has_ouros_size() -> None:
    """A size on disk would be quoted for another model."""
    per_layer = 4 * OURO_1B.hidden**2 + 3 * OURO_1B.hidden * OURO_1B.mlp
    assert OURO_1B.layers * per_layer + 2 * OURO_1B.vocabulary * OURO_1B.hidden == pytest.approx(1.43e9, rel=0.01)


def test_loops_are_counted_by_tokens(bundle: Path) -> None:
    """A short text would weigh as much as a long one, or layers be given for loops."""
    model = replace(read_manifest(bundle).model, num_layers=48, loops=4)
    turns = [Turn([[1, 2]], 1.0, layers_per_token=48, depth=48), Turn([[1, 2, 3, 4]], 1.0, layers_per_token=24, depth=12)]
    assert loop_figures(turns, model) == {"loops": pytest.approx(1.75), "launched": pytest.approx(2.5)}


def test_every_differing_token_counts() -> None:
    """`looped_differs` of 0 would hide a text that ends early."""
    full = [Turn([[1, 2, 3], [4, 5, 6]], 1.0)]
    assert differing(full, full) == 0
    assert differing([Turn([[1, 9, 3], [4, 5]], 1.0)], full) == 2


def test_a_batch_runs_every_policy(exits_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy whose texts are not compared would count as one that does not differ."""
    monkeypatch.setattr(tide, "ThreadOptions", lambda *_, **__: ThreadOptions(1))
    prompts = [[first, 40, 99, 7] for first in range(3, 7)]
    rows = run_batch({1: exits_bundle, 5: exits_bundle}, 2, prompts, new_tokens=6)
    assert [row["arm"] for row in rows] == ["full", EXACT, LOOPS, EXIT]
    assert all(row["groups"] == 2 and row["batch"] == 2 for row in rows)
    assert rows[1]["differing_tokens"] == rows[2]["differing_tokens"] == 0 and rows[0]["ratio_median"] == 1


def test_results_are_of_the_rows_that_they_name(capsys: pytest.CaptureFixture[str]) -> None:
    """The speed of a batch would be published as that of one sequence."""
    report = Report("looped")
    row = {"title": "t", "other_load": 0.0, "ratio_low": 1.0, "ratio_high": 2.0, "tokens_per_s": 9.0, "launched": 1.0}
    rows = [
        row | {"arm": arm, "batch": batch, "ratio_median": x, "ratio_total": x + 0.5, "loops": loops, "differing_tokens": n}
        for arm, batch, x, loops, n in [
            ("full", 1, 1.0, 4.0, 0), (EXACT, 1, 1.7, 4.0, 2), (EXIT, 1, 1.4, 2.5, 70), ("full", 8, 1.0, 4.0, 0),
            (EXACT, 8, 1.2, 4.0, 3), (EXIT, 8, 1.1, 2.6, 90), (LOOPS, 1, 1.3, 4.0, 0), (LOOPS, 8, 1.1, 4.0, 1)]
    ]  # fmt: skip
    add_speeds(report, rows, 8)
    found = report.results
    assert found["looped_exact_speedup"] == 1.7 and found["looped_exact_total"] == 2.2 and found["looped_exact_b8"] == 1.2
    assert found["looped_loops_speedup"] == 1.3 and found["looped_loops_b8"] == 1.1 and found["looped_differs"] == 6
    assert found["looped_exit5_loops"] == 2.5
    exported = {"source": 3e9, "anonymous": 2**30, "printed": ""}
    looped, once = {"loops": 4, "seconds": 90.0, "bundle": 1.03e9}, {"loops": 1, "seconds": 60.0, "bundle": 1e9}
    add_export(report, [exported | looped, exported | once])
    assert report.results["looped_weights_ratio"] == pytest.approx(1.03) and report.results["looped_export_s"] == 90
    assert math.isclose(report.results["looped_export_gib"], 1) and "Export of a looped model" in capsys.readouterr().out
