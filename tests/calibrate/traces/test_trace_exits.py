"""Tracing in parallel parts gives what one pass over all windows gives."""

import numpy as np
import pytest
from calibrate.captured import capture_of
from export.architectures import VOCAB
from tide_calibrate.capture.reference import ReferenceTokens
from tide_calibrate.capture.store import Capture
from tide_calibrate.exit_heads import make_head
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.routers import MaxProbability, MlpRouter
from tide_calibrate.traces.record import WINDOWS_PER_READ, trace_split
from tide_calibrate.train import TrainedExit, trace_exits

TOKENS, WINDOWS = 8, 2 + 6 * WINDOWS_PER_READ


@pytest.fixture(scope="module")
def captured(llama: FrozenModel) -> Capture:
    ids = np.random.default_rng(0).integers(0, VOCAB, (WINDOWS, TOKENS))
    lengths = np.random.default_rng(1).integers(3, TOKENS + 1, WINDOWS)
    return capture_of(llama.model, ids, (1, 2, 3, 4), lengths, np.full(WINDOWS, 1))


@pytest.mark.parametrize("referenced", [False, True])
@pytest.mark.parametrize("limit", [None, 3, 9])
def test_parts_are_joined_in_the_order_of_the_text(
    limit: int | None, referenced: bool, llama: FrozenModel, captured: Capture
) -> None:
    """A certificate counts exits of whole documents; tokens that were lost, doubled or moved would falsify it."""
    keys = [(1, "identity"), (2, "identity"), (2, "tail:1")]
    exits = {key: TrainedExit(make_head(key[1], llama, key[0]), MlpRouter(64, seed=1)) for key in keys}
    reference = None
    if referenced:
        tokens = np.random.default_rng(2).integers(0, VOCAB, (WINDOWS, TOKENS)).astype(np.int32)
        reference = ReferenceTokens("another", "00", np.arange(WINDOWS), tokens)
    made = trace_exits(llama, captured, "threshold", exits, limit, reference)
    heads = {key: trained.head for key, trained in exits.items()}
    routers = {key: (MaxProbability(), trained.router) for key, trained in exits.items()}
    whole = trace_split(captured, "threshold", llama.lm_head, heads, routers, limit, reference)
    assert np.array_equal(made.window, whole.window) and np.array_equal(made.document, whole.document)
    np.testing.assert_array_equal(made.full_nll, whole.full_nll)
    assert list(made.exits) == keys and (made.full_agrees is None) == (not referenced)
    np.testing.assert_equal(made.full_agrees, whole.full_agrees)
    for key in keys:
        np.testing.assert_equal(vars(made.exits[key]), vars(whole.exits[key]))
