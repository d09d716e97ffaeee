"""TIDE's own arm: it measures what `Engine` gives a user, and reads a text with a policy."""

from pathlib import Path

import pytest
from tide_bench.arms import tide
from tide_bench.arms.tide import TideArm, limitation, read_text
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

PROMPTS = [[5, 9, 3, 7], [2, 4, 6, 8]]


@pytest.fixture(autouse=True)
def own_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has ONNX Runtime sessions of other tests, so engines cannot have the pool that all must share."""
    options = EngineOptions(threads=ThreadOptions(1), prefix_cache=False, verify=False)
    monkeypatch.setattr(tide, "load_engine", lambda folder, device: Engine.load(folder, options))


def test_the_arm_gives_the_engines_own_text(exits_bundle: Path) -> None:
    """The table would describe another program than the one that users run."""
    timing = TideArm(exits_bundle).generate(PROMPTS, 6, policy="exact")
    with Engine.load(exits_bundle, EngineOptions(policy="full", threads=ThreadOptions(1))) as engine:
        params = engine.default_params(max_new_tokens=6, ignore_eos=True)
        assert timing.tokens == [list(one.token_ids) for one in engine.generate(PROMPTS, params)]
    assert timing.first_token_s > 0 and timing.decode_s > 0 and timing.layers_per_token


def test_an_earlier_call_drafts_nothing_for_the_next(exits_bundle: Path) -> None:
    """The second turn of a prompt would copy the first one's answer, and look several times as fast."""
    arm = TideArm(exits_bundle)
    first, again = (arm.generate([PROMPTS[0]], 12, policy="exact") for _ in range(2))
    assert again.layers_per_token == first.layers_per_token


def test_what_the_engine_refuses_is_said(exits_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """308 tokens/s of `exact` were published from a machine where the engine runs `full`."""
    monkeypatch.setattr(Engine, "bits_limitation", property(lambda self: "policy exact runs as full: these kernels round"))
    assert TideArm(exits_bundle).generate([PROMPTS[0]], 2, policy="exact").limitation == "policy exact runs as full"


def test_a_default_that_resolves_to_another_policy_is_said(bundle: Path) -> None:
    """`auto` would be taken for a policy of its own."""
    with Engine.load(bundle, EngineOptions(threads=ThreadOptions(1))) as engine:
        assert limitation(engine) == f"auto runs {engine.policy.name}"
    with Engine.load(bundle, EngineOptions(policy="full", threads=ThreadOptions(1))) as engine:
        assert limitation(engine) is None


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
    reading = read_text(arm._loaded, [*PROMPT, *text], len(PROMPT))
    assert reading.answers == text[1:] and reading.layers == 7 * 4 and reading.decode_s > 0


def test_the_text_goes_on_whatever_the_model_predicts(arm: TideArm) -> None:
    """Policies would be compared on texts of their own."""
    other = [11, 12, 13, 14]
    reading = read_text(arm._loaded, [*PROMPT, *other], len(PROMPT))
    assert reading.answers == [arm.generate([PROMPT + other[:i]], 2).tokens[0][0] for i in (1, 2, 3)]


def test_gap_is_the_distance_of_logits(arm: TideArm) -> None:
    """A near tie would not be recognised, or every difference pass as one."""
    params = GenerationParams(max_new_tokens=1, logprobs=2)
    (one, first), (other, second) = arm._loaded.generate(PROMPT, params)[0].logprobs[0].top
    assert arm.gap(PROMPT, one, other) == pytest.approx(first - second, abs=1e-5)
