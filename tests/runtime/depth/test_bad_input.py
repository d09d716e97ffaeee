"""Depth policies on a real bundle: options out of range, texts that end inside a draft, callers that leave or come together."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from runtime.made_up_calibration import calibrate, exit_after
from tide_runtime import Engine, EngineOptions, Generation, GenerationParams, ThreadOptions
from tide_runtime.backends.onnxruntime.bound_steps import OnnxRuntimeContext
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.speculation.record import Guess
from tide_runtime.depth.speculation.text import SequenceText
from tide_runtime.errors import NumericsError, ParamsError

MAX_SEQ_LEN = 64
PROMPTS = ["def add(a, b):", "class", "x x x x x x", "return a + b\nreturn a + b\n"]


def load(bundle: Path, policy: str = "exact", verify: bool = True, **depth: Any) -> Engine:
    options = EngineOptions(policy=policy, depth=DepthOptions(**depth), threads=ThreadOptions(1), verify=verify)
    return Engine.load(bundle, options)


@pytest.fixture(scope="module")
def exact(exits_bundle: Path) -> Iterator[Engine]:
    with load(exits_bundle) as engine:
        yield engine


@pytest.fixture(scope="module")
def full(exits_bundle: Path) -> Iterator[Engine]:
    with load(exits_bundle, "full") as engine:
        yield engine


def params(count: int = 40, **changes: Any) -> GenerationParams:
    return GenerationParams(**{"max_new_tokens": count, "ignore_eos": True, **changes})


def ends(results: list[Generation]) -> list[tuple[Any, ...]]:
    return [(r.token_ids, r.text, r.finish_reason) for r in results]


# --- The policies on real graphs


@pytest.mark.parametrize("draft", ["all", "router", "ngram", "none"])
def test_exact_is_full_on_real_graphs(exits_bundle: Path, full: Engine, draft: str) -> None:
    """Alone, together, and into the end of the cache."""
    with load(exits_bundle, draft=draft) as engine:
        for count in (9, 100):
            wanted = ends(full.generate(PROMPTS, params(count)))
            assert ends(engine.generate(PROMPTS, params(count))) == wanted
            assert [ends(engine.generate(prompt, params(count)))[0] for prompt in PROMPTS] == wanted


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0])
def test_exit_does_not_depend_on_the_batch(exits_bundle: Path, threshold: float) -> None:
    with load(exits_bundle, "exit", threshold=threshold) as engine:
        together = engine.generate(PROMPTS, params())
        alone = [engine.generate(prompt, params())[0] for prompt in PROMPTS]
        assert ends(together) == ends(alone)
        assert [r.stats.token_depths for r in together] == [r.stats.token_depths for r in alone]


def test_the_recommended_policy_is_the_default(exits_bundle: Path) -> None:
    with load(exits_bundle, "auto") as engine:
        assert engine.policy.name == "exact"


# --- What cannot be done is said when the engine is loaded


def test_exit_without_calibration_says_tocalibrate(bundle: Path) -> None:
    with pytest.raises(ParamsError, match=r"needs a calibration.*tide-calibrate MODEL"):
        load(bundle, "exit")


def test_exact_without_calibration_still_copies(bundle: Path, full: Engine) -> None:
    """No exits, but drafts from the text need none."""
    repeating = params(repetition_penalty=0.1)  # a random model repeats itself only when told to
    with load(bundle) as engine:
        results = engine.generate(PROMPTS, repeating)
        assert ends(results) == ends(full.generate(PROMPTS, repeating))
        assert any("ngram" in r.stats.drafted for r in results) and not any("router" in r.stats.drafted for r in results)


@pytest.mark.parametrize(
    ("exits", "words"),
    [([], "use policy full"), ([exit_after(1, None), exit_after(3, None)], "no certified threshold.*max-disagreement")],
)
def test_exit_without_a_threshold_says_what_to_do(bundle_copy: Path, exits: list[dict[str, Any]], words: str) -> None:
    calibrate(bundle_copy, exits)
    with pytest.raises(ParamsError, match=words):
        load(bundle_copy, "exit")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("threshold", -0.1, "from 0"),
        ("threshold", 1.1, "to 1"),
        ("threshold", float("nan"), "from 0"),
        ("threshold", "high", "from 0"),
        ("draft_limit", 0, "from 1 to 64"),
        ("draft_limit", 65, "from 1 to 64"),
        ("draft_limit", 2.5, "from 1 to 64"),
        ("draft_limit", True, "from 1 to 64"),
        ("max_wait_steps", -1, ">= 0"),
        ("max_exit_streak", 0.5, ">= 0"),
        ("min_depth", -1, ">= 0"),
        ("min_depth", None, ">= 0"),
        ("draft", "router,ngram", "all"),
    ],
)
def test_options_out_of_range_are_explained(option: str, value: object, words: str) -> None:
    with pytest.raises(ParamsError, match=f"{option} is .*{words}"):
        DepthOptions(**{option: value})  # type: ignore[arg-type]


def test_min_depth_behind_the_last_exit_is_explained(exits_bundle: Path) -> None:
    with pytest.raises(ParamsError, match=r"min_depth is 4.*at most 3"):
        load(exits_bundle, "exit", min_depth=4)


# --- Ends inside a draft


@pytest.fixture
def foreseen(exact: Engine, full: Engine) -> Iterator[Generation]:
    """What the model says to the first prompt, and a drafter that foresees it: every draft is accepted."""
    [result] = full.generate(PROMPTS[0], params())
    whole = np.array([*exact.tokenizer.encode(PROMPTS[0]), *result.token_ids])  # type: ignore[union-attr]

    def guess(self: SequenceText, tokens: object, end: int, limit: int) -> Guess:
        return Guess(whole[end : end + limit].tolist(), range(99, 99 + limit), "ngram")

    with patch.object(SequenceText, "guess", guess):
        [drafted] = exact.generate(PROMPTS[0], params())
        assert ends([drafted]) == ends([result]) and drafted.stats.deep_passes < 15
        assert drafted.stats.accepted == drafted.stats.drafted
        yield result


def test_a_stop_string_across_accepted_drafts(exact: Engine, full: Engine, foreseen: Generation) -> None:
    """It begins in one accepted token and ends in another; what was accepted behind it is neither text nor tokens."""
    assert foreseen.text is not None
    for start in range(0, len(foreseen.text) - 3, 3):
        stopping = params(stop=(foreseen.text[start : start + 3],))
        [result], [wanted] = exact.generate(PROMPTS[0], stopping), full.generate(PROMPTS[0], stopping)
        assert (ends([result]), result.finish_reason) == (ends([wanted]), "stop")
        assert "".join(chunk.text for chunk in exact.stream(PROMPTS[0], stopping)) == wanted.text


def test_streamed_depths_of_accepted_drafts(exact: Engine, foreseen: Generation) -> None:
    """Tokens accepted in one pass would be shown with the depth of the last of them."""
    chunks = list(exact.stream(PROMPTS[0], params()))
    assert chunks[-1].generation is not None
    depths = chunks[-1].generation.stats.depth_of_each(exact.depth)
    assert tuple(chunk.depth for chunk in chunks) == depths and {0, exact.depth} <= set(depths)


# --- Callers


def test_a_failed_requests_caches_are_not_used_again(exits_bundle: Path) -> None:
    """Attention over several rows multiplies masked slots by 0: one NaN left there would fail every later batch."""
    with load(exits_bundle) as engine:
        wanted = ends(engine.generate(PROMPTS, params()))
        context = engine._loop.context
        assert isinstance(context, OnnxRuntimeContext)
        step = engine.policy.step

        def spoil(*arguments: Any) -> Any:
            step(*arguments)
            for array in context.caches.arrays.values():
                array[: len(PROMPTS)] = np.nan
            raise NumericsError("NaN")

        with patch.object(engine.policy, "step", spoil), pytest.raises(NumericsError):
            engine.generate(PROMPTS, params())
        assert ends(engine.generate(PROMPTS, params())) == wanted


@pytest.mark.parametrize("policy", ["full", "exact", "exit"])
def test_nan_logits_are_explained(bundle_copy: Path, policy: str) -> None:
    """Weights that overflowed when they were converted, or rotted on the disk of somebody who does not verify."""
    calibrate(bundle_copy, exits=[exit_after(1), exit_after(3)])
    weights = bundle_copy / "onnx" / "weights.bin"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    with load(bundle_copy, policy, verify=False) as engine, pytest.raises(NumericsError, match=r"NaN.*compare the bundle"):
        engine.generate([5, 6, 7], params(5))
