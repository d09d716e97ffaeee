"""What a request says about itself: depth by token, promises kept or not, totals for monitoring."""

import html
import json
import re
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
from cli_in_process import Run
from runtime.made_up_calibration import calibrate, exit_after
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.cli.depth_view import html_view, terminal_view
from tide_runtime.depth.options import DepthOptions
from tide_runtime.errors import ParamsError

PROMPT = "return a + b\nreturn a + b\n"
LAYERS = 4
CERTIFICATE = {
    "max_disagreement": 0.01,
    "confidence": 0.95,
    "method": "test",
    "unit": "document",
    "tokens": 1000,
    "documents": 10,
    "measured": 0.004,
    "data_sha256": "",
    "date": "2026-01-01",
}
STEP = {"rows": 1, "seq": 1, "launch_ms": 0.0, "layer_ms": 1.0, "head_ms": 0.1, "exit_ms": 0.1, "host_ms": 0.1}
COSTS = {"target": "cpu", "machine": "somewhere", "unsplit_ms": 5.0, "steps": [STEP, STEP | {"seq": 2}]}
PREDICTED = {"full": 1.0, "exact": 2.0, "exact:router": 1.7, "exact:ngram": 1.9, "exit": 1.5}


@pytest.fixture(scope="module")
def certified(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = Path(shutil.copytree(bundle, tmp_path_factory.mktemp("certified") / "tiny"))
    calibrate(copy, [exit_after(1, 0.2), exit_after(3, 0.2)], certificate=CERTIFICATE, costs=COSTS, predicted=PREDICTED)
    return copy


def load(bundle: Path, policy: str, **depth: Any) -> Engine:
    return Engine.load(bundle, EngineOptions(policy=policy, depth=DepthOptions(**depth), threads=ThreadOptions(1)))


def params(count: int = 20, **changes: Any) -> GenerationParams:
    return GenerationParams(**{"max_new_tokens": count, "ignore_eos": True, **changes})


# --- Launches, counted where ONNX Runtime is called


@pytest.mark.parametrize(
    ("policy", "depth"),
    [
        ("full", {}),
        ("exact", {"draft": "router"}),
        ("exit", {"threshold": 0.0}),
        ("exit", {"threshold": 0.0, "max_exit_streak": 2}),
    ],
)
def test_sessions_run_as_often_as_the_stats_say(
    exits_bundle: Path, monkeypatch: pytest.MonkeyPatch, policy: str, depth: Any
) -> None:
    """Skipped segments would be run all the same, and only the figures say otherwise."""
    ran, run = Counter[int](), ort.InferenceSession.run_with_iobinding

    def counted(session: ort.InferenceSession, *arguments: Any) -> None:
        ran[id(session)] += 1
        run(session, *arguments)

    monkeypatch.setattr(ort.InferenceSession, "run_with_iobinding", counted)
    with load(exits_bundle, policy, **depth) as engine:
        [result] = engine.generate(PROMPT, params())
        names = {id(session): name for name, session in engine.backend.sessions.items()}  # type: ignore[attr-defined]
        found = Counter({names[session]: count for session, count in ran.items()})
        assert found == engine.backend.launches
    if policy == "exit":  # after the prompt: what lies behind the exit is run for every third token, or never
        assert found["segment_0"] == 19 and found["segment_2"] == (6 if depth.get("max_exit_streak") else 0)
        assert result.stats.layers_per_token == pytest.approx((19 + 3 * found["segment_2"]) / 19)


# --- Depth by token


@pytest.mark.parametrize("policy", ["full", "exact", "exit"])
@pytest.mark.parametrize("stops", [False, True])
def test_the_coloured_text_is_the_text(certified: Path, policy: str, stops: bool) -> None:
    """Tokens would be missing, or what ended the text shown with it."""
    with load(certified, policy) as engine:
        if stops:
            [whole] = engine.generate(PROMPT, params())
            assert whole.text
            [result] = engine.generate(PROMPT, params(stop=(whole.text[6:9],)))
            assert result.finish_reason == "stop" and result.text == whole.text[: whole.text.index(whole.text[6:9])]
        else:
            [result] = engine.generate(PROMPT, params())
        assert result.text is not None
        shown, page = (view(result, engine.tokenizer, LAYERS) for view in (terminal_view, html_view))
        tokens = str(page).split("<pre>")[1].split("</pre>")[0]
        assert html.unescape(re.sub("<[^>]*>", "", tokens)) == result.text
        assert str(shown).startswith(result.text + "\n")
        titles = [int(depth) for depth in re.findall(r'title="(\d+) of 4 layers"', tokens)]
        assert titles[: len(result.token_ids)] == list(result.stats.depth_of_each(LAYERS))


def test_the_end_of_the_text_is_not_coloured(certified: Path) -> None:
    with load(certified, "full") as engine:
        [whole] = engine.generate(PROMPT, params())
        [result] = engine.generate(PROMPT, params(ignore_eos=False, eos_token_ids=(whole.token_ids[5],)))
        assert result.finish_reason == "eos" and result.text is not None
        assert str(terminal_view(result, engine.tokenizer, LAYERS)).startswith(result.text + "\n")


@pytest.mark.parametrize("policy", ["full", "exit"])
def test_a_stream_gives_each_token_its_depth(certified: Path, policy: str) -> None:
    """A view that is drawn as tokens arrive would differ from the one drawn from the finished text."""
    with load(certified, policy) as engine:
        chunks = list(engine.stream(PROMPT, params()))
        assert chunks[-1].generation is not None
        depths = chunks[-1].generation.stats.depth_of_each(LAYERS)
        assert tuple(chunk.depth for chunk in chunks) == depths
        assert (len(set(depths)) == 1) == (policy == "full")


def test_views_are_written_by_the_command(certified: Path, tmp_path: Path, command: Run) -> None:
    page = tmp_path / "depth.html"
    options = ("--policy", "exit", "--max-new-tokens", 8, "--ignore-eos", "--stats", "--show-depth", "--depth-html", page)
    done = command("run", certified, PROMPT, *options)
    assert done.code == 0, done.err
    assert "layers: " in done.out and "of 4 layers" in page.read_text()
    said = " ".join(done.err.split())
    for part in ("Launches, prompt included", "segment_0", "time: prompt", "the calibration predicts 1.50"):
        assert part in said
    assert "certified: at most 1.0% of tokens differ from the full model's, with 95% confidence" in said


def test_a_folder_that_is_missing_is_said_before_anything_runs(certified: Path, tmp_path: Path, command: Run) -> None:
    done = command("run", certified, PROMPT, "--depth-html", tmp_path / "none" / "depth.html")
    assert (done.code, done.out) == (2, "") and "there is no folder" in done.err


# --- Promises


@pytest.mark.parametrize(
    ("policy", "depth", "changes", "reason"),
    [
        ("exit", {}, {}, None),
        ("exit", {"max_exit_streak": 2}, {}, None),  # more tokens take every layer, and differ less
        ("exit", {"threshold": 0.2}, {}, "threshold 0.2"),
        ("exit", {"min_depth": 3}, {}, "min_depth 3"),
        ("exit", {}, {"temperature": 0.7, "seed": 1}, "the text was sampled"),
        ("exit", {}, {"repetition_penalty": 1.2}, "the text was sampled"),
        ("exit", {}, {"depth_budget": 1.5}, "depth budget"),
        ("full", {}, {"temperature": 0.5}, None),  # the model's own output
        ("exact", {}, {"temperature": 0.5}, None),
    ],
)
def test_why_no_certificate_covers_an_output_is_said(
    certified: Path, policy: str, depth: Any, changes: Any, reason: str | None
) -> None:
    """Somebody would rely on a bound that nobody has given for this text."""
    with load(certified, policy, **depth) as engine:
        [result] = engine.generate(PROMPT, params(**changes))
        assert result.stats.policy == policy
        assert [reason in said for said in result.stats.uncovered] == [True] if reason else result.stats.uncovered == ()
        uncovered = int(re.findall(r"^tide_uncovered_tokens_total (\d+)", engine.metrics(), re.M)[0])
        assert uncovered == (len(result.token_ids) if reason else 0)


@pytest.mark.parametrize(
    ("policy", "depth", "changes", "predicted"),
    [
        ("full", {}, {}, 1.0),
        ("exact", {}, {}, 2.0),
        ("exact", {"draft": "router"}, {}, 1.7),
        ("exact", {"draft": "ngram"}, {}, 1.9),
        ("exact", {"draft": "none"}, {}, None),
        ("exact", {}, {"temperature": 0.8}, None),
        ("exit", {}, {}, 1.5),
        ("exit", {"threshold": 0.9}, {}, None),
        ("exit", {"max_exit_streak": 4}, {}, None),
    ],
)
def test_speed_is_held_against_the_prediction_for_what_ran(
    certified: Path, policy: str, depth: Any, changes: Any, predicted: float | None
) -> None:
    with load(certified, policy, **depth) as engine:
        [alone] = engine.generate(PROMPT, params(**changes))
        assert alone.stats.speedup == pytest.approx(5.0 * alone.stats.tokens_per_second / 1e3)
        assert alone.stats.predicted_speedup == predicted
        assert engine.generate([PROMPT, "class"], params())[0].stats.speedup is None  # rows share their time


@pytest.mark.parametrize("policy", ["exact", "full"])
def test_policies_with_the_models_own_output_take_no_budget(certified: Path, policy: str) -> None:
    """A request would run through every layer although it wants fewer."""
    with load(certified, policy) as engine, pytest.raises(ParamsError, match="promises the model's own output"):
        engine.generate(PROMPT, params(depth_budget=2))


@pytest.mark.parametrize(
    ("depth", "least", "message"),
    [
        ({}, 1, "the first exit comes after 1; set it to at least 1"),
        ({"min_depth": 2}, 3, "after 3; set it to at least 3"),
        ({"max_exit_streak": 2}, 2, r"max_exit_streak 2 sends one token in 3 through all 4; set it to at least 2"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(certified: Path, depth: Any, least: float, message: str) -> None:
    with load(certified, "exit", **depth) as engine:
        with pytest.raises(ParamsError, match=message):
            engine.generate(PROMPT, params(depth_budget=least - 0.01))
        [result] = engine.generate(PROMPT, params(31, depth_budget=least))
        depths = result.stats.token_depths
        assert len(depths) == 30 and sum(depths) <= least * 30


# --- Totals


def totals(engine: Engine) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in engine.metrics().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_totals_are_those_of_the_requests(certified: Path) -> None:
    """Monitoring would show figures that nobody measured."""
    with load(certified, "exact") as engine:
        # A random model repeats itself only when told to.
        results = engine.generate([PROMPT, "class"], params(repetition_penalty=0.1))
        found, stats = totals(engine), [result.stats for result in results]
        assert found['tide_requests_total{reason="length"}'] == 2
        assert found["tide_prompt_tokens_total"] == sum(s.prompt_tokens for s in stats)
        by_depth = Counter[int]()
        for s in stats:
            by_depth.update(s.depths(LAYERS))
        for layers, count in by_depth.items():
            assert found[f'tide_generated_tokens_total{{layers="{layers}"}}'] == count
        drafted = {name: sum(s.drafted.get(name, 0) for s in stats) for s in stats for name in s.drafted}
        assert drafted and all(found[f'tide_drafted_tokens_total{{drafter="{name}"}}'] == n for name, n in drafted.items())
        assert found["tide_deep_passes_total"] == sum(s.deep_passes for s in stats)
        assert found["tide_decoder_layers_total"] == pytest.approx(sum(s.layers_per_token * (s.new_tokens - 1) for s in stats))
        assert found["tide_decode_seconds_total"] == pytest.approx(sum(s.decode_time for s in stats))
        assert 0 < found["tide_exit_seconds_total"] == pytest.approx(sum(s.exit_time for s in stats))
        assert all(s.exit_time < s.decode_time for s in stats)
        for graph, count in engine.backend.launches.items():
            assert found[f'tide_graph_launches_total{{graph="{graph}"}}'] == count


@pytest.mark.parametrize("policy", ["full", "exact", "exit"])
def test_a_cancelled_stream_counts_as_far_as_it_came(certified: Path, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launches are counted: launches per token would be wrong wherever clients hang up."""
    with load(certified, policy) as engine:
        step = engine.policy.step

        def slow_step(*arguments: Any) -> list[list[int]]:
            time.sleep(0.01)  # or a busy machine may finish the text before this thread hangs up
            return step(*arguments)

        monkeypatch.setattr(engine.policy, "step", slow_step)
        handle = engine.submit(PROMPT, replace(params(), max_new_tokens=60))
        for number, _ in enumerate(handle, 1):
            if number == 5:
                break
        done, found = handle.result(), totals(engine)
        assert (done.finish_reason, len(done.token_ids) >= 5) == ("cancelled", True)
        assert found['tide_requests_total{reason="cancelled"}'] == 1
        generated = sum(count for name, count in found.items() if name.startswith("tide_generated_tokens_total"))
        assert generated == len(done.token_ids)


def test_json_says_all_that_the_tables_say(certified: Path, command: Run) -> None:
    options = ("--policy", "exit", "--threshold", 0.3, "--max-new-tokens", 8, "--ignore-eos", "--json")
    stats = json.loads(command("run", certified, PROMPT, *options).out)["stats"]
    assert stats["uncovered"] == ["threshold 0.3 was set by hand"] and stats["predicted_speedup"] is None
    assert stats["speedup"] > 0 and stats["launches"]["segment_0"] > 0 and stats["forced"] == 0
