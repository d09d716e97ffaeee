"""Greedy continuations: equal to ``generate``, from the right splits, cut at end tokens, traced at generated tokens only."""

import numpy as np
import pytest
import torch
from calibrate.synthetic_calibration import synthetic_trace
from export.architectures import VOCAB, tiny_model
from tide_calibrate.text.documents import SPLITS, Windows
from tide_calibrate.traces.continuations import BATCH_SIZE, continue_prompts, generated_tokens
from tide_calibrate.traces.trace import SplitTrace
from tide_runtime.errors import DataError
from transformers import PreTrainedModel

WIDTH, NEW = 12, 5
PROMPT = WIDTH - NEW


@pytest.fixture(scope="module")
def windows() -> Windows:
    """One window per document; the threshold and the test split have more than one batch each."""
    count = 3 * (BATCH_SIZE + 4)
    tokens = np.random.default_rng(0).integers(1, VOCAB, (count, WIDTH)).astype(np.int32)
    return Windows(tokens, np.full(count, WIDTH, np.int32), np.arange(count, dtype=np.int32))


@pytest.fixture
def model() -> PreTrainedModel:
    """A model without an end token."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def split(windows: Windows) -> np.ndarray:
    return (windows.document % 3).astype(np.int8)


def test_continuations_equal_generate(model: PreTrainedModel, windows: Windows, split: np.ndarray) -> None:
    """Batches run in parallel on one model; a shared cache or a wrong order would give text that the model does not generate."""
    own, prompts = continue_prompts(model, windows, split, 2 * (BATCH_SIZE + 2), NEW)
    assert len(own.tokens) == 2 * (BATCH_SIZE + 2) and set(prompts) == {PROMPT}
    assert {SPLITS[split[document]] for document in own.document} == {"threshold", "test"}
    prompt_ids = torch.from_numpy(windows.tokens[own.document, :PROMPT]).long()
    mask = torch.ones_like(prompt_ids)
    expected = model.generate(prompt_ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW)  # type: ignore[operator]
    assert own.tokens.tolist() == expected.tolist()
    assert set(own.lengths) == {WIDTH}


def test_continuations_are_cut_at_the_end_token(model: PreTrainedModel, windows: Windows, split: np.ndarray) -> None:
    """The runtime never generates tokens after an end token, so speed must not be predicted on them."""
    whole, _ = continue_prompts(model, windows, split, 8, NEW)
    model.generation_config.eos_token_id = int(whole.tokens[0, PROMPT + 1])
    own, _ = continue_prompts(model, windows, split, 8, NEW)
    assert own.lengths[0] <= PROMPT + 2
    for row, length in zip(own.tokens, own.lengths, strict=True):
        assert (row[length:] == 0).all()
        assert length == WIDTH or row[length - 1] == model.generation_config.eos_token_id


def test_only_generated_tokens_are_traced() -> None:
    """The state at a prompt's last token predicts the first new token; the state at the last token predicts none that is kept."""
    window = np.repeat(np.arange(2, dtype=np.int32), WIDTH)
    trace = SplitTrace(window, window, np.tile(np.arange(WIDTH, dtype=np.float32), 2), {}, num_layers=4)
    kept = generated_tokens(trace, np.full(2, PROMPT, np.int32))
    assert kept.full_nll.tolist() == [*range(PROMPT - 1, WIDTH - 1)] * 2


def test_traces_of_two_splits_are_joined() -> None:
    """Speed is predicted on both splits; a token beside another one's agreement would falsify it."""
    whole = synthetic_trace()
    first, rest = whole.window < 7, whole.window >= 7
    joined = whole.select(first).joined(whole.select(rest))
    for field in ("window", "document", "full_nll"):
        assert np.array_equal(getattr(joined, field), getattr(whole, field), equal_nan=field == "full_nll")
    for key, trace in whole.exits.items():
        assert np.array_equal(joined.exits[key].agrees, trace.agrees)
        assert all(np.array_equal(joined.exits[key].scores[name], scores) for name, scores in trace.scores.items())


def test_prompts_are_balanced_over_documents(model: PreTrainedModel) -> None:
    """Otherwise one long file would dominate the placement of exits and the predicted speed."""
    document = np.array([0] * 12 + [1] * 2 + [2] * 6 + [3] * 6, np.int32)
    tokens = np.ones((len(document), WIDTH), np.int32)
    own, _ = continue_prompts(
        model, Windows(tokens, np.full(len(tokens), WIDTH, np.int32), document), np.array([1, 1, 1, 2], np.int8), 16, NEW
    )
    assert np.bincount(own.document).tolist() == [3, 2, 3, 6]
    short = Windows(tokens, np.full(len(tokens), PROMPT - 1, np.int32), document)
    with pytest.raises(DataError, match="no window of 7 tokens"):
        continue_prompts(model, short, np.array([1, 1, 1, 2], np.int8), 8, NEW)
