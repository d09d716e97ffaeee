"""Copied drafts in the simulation: by hand, against the runtime itself, and mixed with exits."""

from dataclasses import replace

import numpy as np
import pytest
from calibrate.cost_model import EXTRA, HOST, LAUNCH, LAYER, LAYERS, LOGITS, table, trace
from runtime.numpy_backend import NumpyBackend, tiny_manifest
from runtime.tiny_generation import Request, generate
from runtime.tiny_transformer import TinyTransformer
from tide_calibrate.placement.search import choose_exits, gate_exits, predict
from tide_calibrate.simulation.exact import simulate_exact
from tide_calibrate.traces.trace import OwnText, SplitTrace
from tide_runtime.bundle.calibration import CalibrationInfo, ExitInfo
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.registry import make_policy
from tide_runtime.errors import CalibrationError, ParamsError
from tide_runtime.generation_params import GenerationParams

EXIT = ExitInfo(4, "identity", "max_probability", 0.5)
NOVEL, LOOP = list(range(50, 90)), [1, 2, 3] * 14


def written(text: list[int], confident: float = 0.0, right: float = 1.0, layers: int = LAYERS) -> SplitTrace:
    """The trace of a model that wrote ``text`` but for its first two tokens. Its exit is ``confident`` and so often ``right``."""
    count = len(text) - 2
    made = trace({4: ([confident] * count, np.random.default_rng(0).random(count) < right)})
    return replace(made, texts={0: OwnText(np.array(text), 2)}, num_layers=layers)


def through(layers: int, tokens: int) -> float:
    return LAUNCH + layers * (LAYER + EXTRA * (tokens - 1)) + LOGITS + HOST


def test_a_loop_is_copied_by_hand() -> None:
    """A token must come again before anything can be copied; then passes take as many as their chance makes worth it."""
    text = written([1, 2, 3, 1, 2, 3, 1, 2, 3])
    done = simulate_exact(text, [], table(), 0, "ngram")
    # Tokens 3 and 1 one by one: then 1 has been seen before, and two are copied behind it. Two are left: one copied, and its own.
    assert done.ms_per_token * 7 == pytest.approx(2 * through(LAYERS, 1) + through(LAYERS, 3) + through(LAYERS, 2))
    assert (done.acceptance, done.tokens_per_cycle) == (1.0, 7 / 4)
    assert done.layers_per_token * 7 == 4 * LAYERS
    assert done.stops == {LAYERS: 1.0}


@pytest.mark.parametrize("seed", range(4))
def test_the_runtime_copies_as_simulated(seed: int) -> None:
    """What is predicted must be what runs: its drafter, its limits, and how it decides whether copying is worth a pass."""
    model, costs = TinyTransformer(seed, (0.5, 0.1, 0.1), 5, 128), table(layers=3)
    manifest = replace(tiny_manifest(model, ()), calibration=CalibrationInfo([], 0, "exact", costs=costs))
    request = Request((1, 2, 3, 4, 1, 2), GenerationParams(max_new_tokens=100), 0)
    policy = make_policy("exact", manifest, DepthOptions(draft="ngram"))
    (row,) = generate(policy, NumpyBackend(manifest, model), [request], 1)
    text = row.tokens[: row.num_tokens]
    given = len(request.prompt) + 1  # the prefill makes the first token
    known = replace(written(text[given - 2 :].tolist(), layers=3), texts={0: OwnText(text, given)})
    done = simulate_exact(known, [], costs, 0, "ngram")
    drafted = row.depth.drafted.total()
    assert drafted > 20
    assert done.acceptance == pytest.approx(row.depth.accepted.total() / drafted)
    assert done.tokens_per_cycle == pytest.approx(len(known.window) / row.depth.deep_passes)


def test_outputs_draft_for_later_texts() -> None:
    """The engine keeps successors of earlier replies; a prediction without them is too low for texts that resemble each other."""
    known = trace({4: ([0.0] * 60, [True] * 60)}, window=[0] * 30 + [1] * 30)
    texts = {window: OwnText(np.array([100 + window, 101 + window, *range(50, 80)]), 2) for window in (0, 1)}
    both, first = replace(known, texts=texts), replace(known.select(known.window == 0), texts=texts)
    assert simulate_exact(first, [], table(), 0, "ngram").acceptance is None
    assert (simulate_exact(both, [], table(), 0, "ngram").acceptance or 0) > 0.9


def test_every_lookup_is_charged() -> None:
    """A lookup takes the host as long where nothing is found. Left out, small models are oversold by a tenth."""
    expensive = replace(table(), steps=[replace(step, extra_host_ms=0.25) for step in table().steps])
    text = written(NOVEL)
    before, after = (simulate_exact(text, [], costs, 0, "ngram").ms_per_token for costs in (table(), expensive))
    assert after - before == pytest.approx(0.25)
    plain = [simulate_exact(text, [], costs, 0) for costs in (table(), expensive)]
    assert plain[0] == plain[1], "without a lookup there is nothing to charge"


def test_novel_text_is_as_fast_as_without_copies() -> None:
    """Nothing to copy: exits alone must be predicted, not a penalty for looking."""
    text = written(NOVEL, confident=0.9)
    alone, both = (simulate_exact(text, [EXIT], table(), 4, draft) for draft in ("router", "all"))
    assert both == alone
    assert alone.speedup > simulate_exact(text, [EXIT], table(), 4, "ngram").speedup


def test_both_copy_the_loop_and_draft_the_rest() -> None:
    text = written(NOVEL + LOOP, confident=0.9)
    speed = {draft: simulate_exact(text, [EXIT], table(), 4, draft).speedup for draft in ("ngram", "router", "all")}
    assert speed["all"] > max(speed["ngram"], speed["router"])


def test_exits_that_lose_rest_beside_copies() -> None:
    """The runtime stops asking exits that do not pay; a prediction that goes on paying for them would recommend `full`."""
    text = written(NOVEL + LOOP)  # never confident: asked in vain
    assert simulate_exact(text, [EXIT], table(), 4).speedup < 1
    assert simulate_exact(text, [EXIT], table(), 4, "all") == simulate_exact(text, [EXIT], table(), 4, "ngram")


def test_copies_alone_can_be_worth_exact() -> None:
    """A model that no exit suits but whose text repeats: `exact` without cuts, and the reason said."""
    text = written(NOVEL + 3 * LOOP, confident=0.9, right=0.4)
    placed = choose_exits(text, table())
    assert (placed.exits, placed.recommended) == ([], "exact")
    assert placed.predicted["exact"] == placed.predicted["exact:ngram"] > 1.02
    assert "best exits found" in placed.reason


def test_copies_do_not_pay_for_exits() -> None:
    """A loop makes any bundle fast. An exit that loses where the text does not loop would be a cut for nothing."""
    text = written(3 * LOOP, confident=0.9, right=0.0)
    assert predict(text, table(), [EXIT], 1).recommended == "exact"
    assert gate_exits(text, table(), [EXIT], 1).exits == []
    assert gate_exits(written(NOVEL, confident=0.9), table(), [EXIT], 4).exits == [EXIT]


def test_there_is_nothing_to_copy_from_in_other_peoples_text() -> None:
    with pytest.raises(CalibrationError, match="no texts to copy from"):
        simulate_exact(trace({4: ([0.9], [True])}), [EXIT], table(), 4, "all")
    with pytest.raises(ParamsError, match="draft is 'magic'"):
        simulate_exact(written(NOVEL), [EXIT], table(), 4, "magic")  # type: ignore[arg-type]
