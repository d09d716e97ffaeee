"""Policy `exact` with loops as rows over the NumPy backend: the texts of `full`, whatever runs beside them, in fewer launches."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from runtime.numpy_backend import NumpyBackend, tiny_manifest
from runtime.tiny_generation import Request, generate, output
from runtime.tiny_transformer import TinyTransformer
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import LOOP
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.exit_wavefront import ExitWavefront
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.options import DepthOptions, Drafters, ExitRule
from tide_runtime.depth.wavefront import WavefrontDepth
from tide_runtime.generation_params import GenerationParams

LOOPS, SLOTS = 4, 64
UNSURE = (0.7, 0.7, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2)  # deeper loops often change the guess
SURE = (0.7, 0.7, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def backend(strengths: tuple[float, ...], seed: int = 1, exits: Sequence[ExitInfo] = ()) -> NumpyBackend:
    model = TinyTransformer(seed, strengths, 31, SLOTS)
    manifest = tiny_manifest(model, (2, 4, 6), exits, loops=LOOPS)
    return NumpyBackend(replace(manifest, model=replace(manifest.model, exit_threshold=1.0)), model)


def policy(of: NumpyBackend, after: int | None = None, draft: Drafters = "all") -> WavefrontDepth:
    made = WavefrontDepth(of.manifest, DepthOptions(draft=draft))
    if after is not None:
        made.starts_after = lambda states: after  # type: ignore[method-assign]
    return made


def exiting(of: NumpyBackend, after: int | None, options: DepthOptions) -> ExitWavefront:
    made = ExitWavefront(of.manifest, options)
    if after is not None:
        made.starts_after = lambda states: after  # type: ignore[method-assign]
    return made


def requests(count: int, **params: object) -> list[Request]:
    prompts = [tuple(range(1 + n, 4 + 2 * n)) for n in range(count)]
    asked = [GenerationParams(max_new_tokens=20 + 3 * n, **params) for n in range(count)]  # type: ignore[arg-type]
    return [Request(prompt, own, n) for n, (prompt, own) in enumerate(zip(prompts, asked, strict=True))]


@pytest.mark.parametrize("after", [1, 2, 3, 4, None])
@pytest.mark.parametrize("strengths", [UNSURE, SURE])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 7}, {"repetition_penalty": 1.3}, {"eos_token_ids": (3, 9)}])
def test_texts_are_those_of_full_depth(strengths: tuple[float, ...], params: dict[str, object], after: int | None) -> None:
    """A user would get another text; the audit compares every cached key and waiting state with the text's own."""
    here, asked = backend(strengths), requests(3, **params)
    plain = [output(row) for row in generate(FullDepth(), here, asked, capacity=3)]
    assert [output(row) for row in generate(policy(here, after), here, asked, capacity=3)] == plain
    assert [output(row) for row in generate(policy(here, after), here, asked, capacity=2, chunk=2)] == plain


def test_a_right_guess_takes_one_launch_a_token() -> None:
    """Loops as rows would cost as many launches as full depth."""
    here, asked = backend(SURE), requests(1)
    (row,) = generate(policy(here, 1, "router"), here, asked, capacity=1)
    tokens = len(row.new_tokens)
    assert here.launches[LOOP] == tokens - 1 + LOOPS - 1
    assert row.depth.accepted["loop"] == tokens - 2  # all but the prompt's own and the last, for which no draft has room
    assert row.depth.token_depths == [2] * (tokens - 2) + [8]


def test_nothing_starts_early_where_rows_cost_too_much() -> None:
    """A batch that computes would become slower by its drafts."""
    here = backend(SURE)
    made = policy(here, draft="router")
    made.launch_ms = lambda size, tokens: float(size * tokens)  # type: ignore[method-assign,assignment]
    (row,) = generate(made, here, requests(1), capacity=1)
    assert not row.depth.drafted


def test_copies_of_the_text_start_together() -> None:
    """A text that repeats would take a launch for each of its tokens."""
    here = backend((0.0,) * 8)
    here.model.weights["position"][:] = 0.0  # each token has one successor, so the text soon goes round
    (row,) = generate(policy(here, 1), here, [Request((1, 2), GenerationParams(max_new_tokens=56), 0)], capacity=1)
    assert row.depth.accepted["ngram"] and here.launches[LOOP] < len(row.new_tokens)


@pytest.mark.parametrize(
    "router, params",
    [
        ("max_probability", {}),
        ("mlp", {"temperature": 0.8, "seed": 7, "logprobs": 2}),
        ("mlp+max_probability", {"depth_budget": 4.5}),
        ("gate", {"temperature": 0.8, "seed": 7, "logprobs": 2}),
        ("gate", {"depth_budget": 4.5}),
    ],
)
def test_exit_stops_where_it_does_without_rows(router: str, params: dict[str, object]) -> None:
    """A token would leave at another loop because of what was guessed of it, and the certificate would not hold."""
    exits = [ExitInfo(end, "identity", router, 0.0, at, 0.4) for end, at in ((2, 0.55), (4, 0.45), (6, 0.5))]
    here, asked = backend(UNSURE, exits=exits), requests(3, **params)
    rule: ExitRule = "model" if router == "gate" else "threshold"
    options = DepthOptions(exit_rule=rule, threshold=0.5 if rule == "model" else None)
    wanted = generate(ExitDepth(here.manifest, options, evaluates_always=True), here, asked, capacity=3)
    assert len({depth for row in wanted for depth in row.depth.token_depths}) > 2, "the exits do not differ"
    for after, rows in ((1, 3), (2, 2), (None, 3)):
        found = generate(exiting(here, after, options), here, asked, capacity=rows)
        assert [output(row) for row in found] == [output(row) for row in wanted]
        for one, other in zip(found, wanted, strict=True):
            assert (one.depth.token_depths, one.depth.forced) == (other.depth.token_depths, other.depth.forced)
            assert [known.logprob for known in one.logprobs] == pytest.approx([known.logprob for known in other.logprobs])


def test_an_exit_frees_its_row_at_once() -> None:
    """Sequences of a batch would wait for those that run deeper."""
    here = backend(UNSURE, exits=[ExitInfo(2, "identity", "max_probability", 0.0, 0.5)])
    rows = generate(exiting(here, LOOPS, DepthOptions(draft="router")), here, requests(4), capacity=4)
    launches = [sum(depth // 2 for depth in row.depth.token_depths) for row in rows]
    assert here.launches[LOOP] == max(launches) < sum(launches) / 2
