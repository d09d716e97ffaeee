"""Reading a text with a policy, on a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tide_bench.arms import tide
from tide_bench.arms.tide import TideArm
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

PROMPT = [5, 9, 3, 7]


@pytest.fixture(scope="module")
def arm(bundle: Path) -> TideArm:
    """In this process, whose other tests have ONNX Runtime sessions of their own, so without the pool that all must share."""
    options = EngineOptions(threads=ThreadOptions(1), verify=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tide, "load_engine", lambda folder, device: Engine.load(folder, options))
        return TideArm(bundle)


def test_a_model_agrees_with_its_own_text(arm: TideArm) -> None:
    """The curve's agreement would compare places that are one apart."""
    text = arm.generate([PROMPT], 8).tokens[0]
    reading = arm.read([*PROMPT, *text], len(PROMPT), "full")
    assert reading.answers == text[1:] and reading.layers == 7 * 4 and reading.decode_s > 0


def test_the_text_goes_on_whatever_the_model_predicts(arm: TideArm) -> None:
    """Policies would be compared on texts of their own."""
    other = [11, 12, 13, 14]
    reading = arm.read([*PROMPT, *other], len(PROMPT), "full")
    assert reading.answers == [arm.generate([PROMPT + other[:i]], 2).tokens[0][0] for i in (1, 2, 3)]


def test_nats_are_the_models_own(arm: TideArm) -> None:
    """Perplexity would not be the text's."""
    params = GenerationParams(max_new_tokens=3, ignore_eos=True, logprobs=1)
    done = arm._loaded.generate(PROMPT, params)[0]
    reading = arm.read([*PROMPT, *done.token_ids], len(PROMPT), "full")
    assert reading.nats == pytest.approx([-entry.logprob for entry in done.logprobs[1:]], abs=1e-5)


def test_gap_is_the_distance_of_logits(arm: TideArm) -> None:
    """A near tie would not be recognised, or every difference pass as one."""
    params = GenerationParams(max_new_tokens=1, logprobs=2)
    (one, first), (other, second) = arm._loaded.generate(PROMPT, params)[0].logprobs[0].top
    assert arm.gap(PROMPT, one, other) == pytest.approx(first - second, abs=1e-5)
