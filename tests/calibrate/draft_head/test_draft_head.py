"""Tests of the draft head: formulas, training, and the exported graph against the trained module."""

import copy

import numpy as np
import pytest
import torch
from calibrate.captured import capture_of
from export.architectures import LAYERS, tiny_model
from numpy.typing import NDArray
from tide_calibrate.draft_head import replies as replies_module
from tide_calibrate.draft_head import train as train_module
from tide_calibrate.draft_head.head import DraftHead
from tide_calibrate.draft_head.replies import Replies, write_replies
from tide_calibrate.draft_head.train import chain, draft_vocabulary, measure_guesses, train_draft_head
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.text.documents import SplitText, Windows
from tide_runtime.errors import DataError
from transformers import PreTrainedModel

from tide_export.sources.loaded_model import LoadedModel

TOKENS, MIDDLE = 24, 2
PIECE, NEW = 40, 88  # half of a window of 80, and what is left of the model's 128 positions
REPLIES = 49  # more than a batch: two threads write them


def windows_of(model: PreTrainedModel, count: int = 24) -> NDArray[np.int64]:
    """[count, TOKENS] greedy continuations of random tokens: text that the model itself would write."""
    vocab = model.config.get_text_config().vocab_size
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, vocab, (count, 1)))
    with torch.no_grad():
        for _ in range(TOKENS - 1):
            tokens = torch.cat([tokens, model(input_ids=tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens.numpy()


def replies_of(model: PreTrainedModel) -> Replies:
    tokens = windows_of(model)
    count, layers = len(tokens), model.config.get_text_config().num_hidden_layers
    return Replies(
        capture_of(model, tokens, [MIDDLE, layers], np.full(count, TOKENS), np.zeros(count, int)), np.zeros(count, np.int64)
    )


def head_of(model: FrozenModel, replies: Replies) -> DraftHead:
    capture = replies.capture
    vocabulary = draft_vocabulary(capture, capture, model.model.config.get_text_config().vocab_size)
    return DraftHead(model, MIDDLE, vocabulary, torch.from_numpy(capture.hidden[capture.num_layers]).flatten(0, 1).float(), 0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_an_untrained_head_has_the_models_norm_and_lm_head(name: str) -> None:
    model = FrozenModel(tiny_model(name))
    replies = replies_of(model.model)
    head, capture = head_of(model, replies), replies.capture
    states = torch.from_numpy(capture.hidden[capture.num_layers]).float()
    with torch.no_grad():
        ours, own = head.logits(states), model.lm_head(states)[..., head.vocabulary]
    agreement = float((ours.argmax(-1) == own.argmax(-1)).float().mean())
    assert agreement > (0.7 if name == "gpt2" else 0.95)  # GPT-2's norm also subtracts the mean


def test_guesses_chain_along_the_text() -> None:
    """The second guess reads the first one's state and the next token, and is compared with the model's choice behind it."""
    model = FrozenModel(tiny_model("llama"))
    replies = replies_of(model.model)
    head, capture = head_of(model, replies), replies.capture
    first, second = chain(head, replies, np.array([2]), 2)
    tokens = torch.from_numpy(capture.tokens[2].astype(np.int64))
    middle, state = (torch.from_numpy(capture.hidden[layer][2:3, 4:5]).float() for layer in (MIDDLE, capture.num_layers))
    embedded = model.model.get_input_embeddings()(tokens)[None]
    state = head(embedded[:, 5:6], middle, state)
    torch.testing.assert_close(first.states[:, 4], state[:, 0])
    torch.testing.assert_close(second.states[:, 4], head(embedded[:, 6:7], state, state)[:, 0])
    assert int(second.top_ids[0, 4, 0]) == int(capture.top_ids[2, 6, 0])
    assert int(first.tokens[0, 4]) == int(tokens[6])


def test_training_learns_and_measures_on_replies_that_it_did_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "STEPS", (400,))
    monkeypatch.setattr(train_module, "LEARNING_RATE", 3e-3)
    model = FrozenModel(tiny_model("llama"))
    replies = replies_of(model.model)
    everything = np.arange(len(replies.capture.tokens))
    before = measure_guesses(head_of(model, replies), replies, everything)
    trained = train_draft_head(model, replies.capture, replies, MIDDLE, seconds=1.0)
    after = measure_guesses(trained.head, replies, everything)
    assert after.acceptance[0] > before.acceptance[0] + 0.1
    shares = [share for _, share in trained.info.classes]
    assert all(0 <= share <= 1 for share in shares) and trained.info.vocabulary == len(trained.head.vocabulary)


def test_replies_carry_the_states_of_a_forward_pass() -> None:
    model = tiny_model("llama")
    text = split_text(np.random.default_rng(1).integers(3, 60, (4, 80)).astype(np.int32))
    loaded = LoadedModel(model, None, "tiny")
    written = write_replies(loaded, text, [MIDDLE, LAYERS], REPLIES, seed=0)
    capture = written.capture
    assert capture.tokens.shape == (REPLIES, NEW) and set(written.first_positions) == {PIECE - 1}
    again = write_replies(loaded, text, [MIDDLE, LAYERS], REPLIES, seed=0)
    np.testing.assert_array_equal(capture.tokens, again.capture.tokens)
    pieces = [row[start : start + PIECE] for row in text.windows.tokens for start in range(81 - PIECE)]
    assert any(_states_fit(model, piece, capture.tokens[0], capture.hidden) for piece in pieces)


def _states_fit(
    model: PreTrainedModel, piece: NDArray[np.int32], reply: NDArray[np.int32], hidden: dict[int, NDArray[np.generic]]
) -> bool:
    whole = np.concatenate([piece, reply[1:]])[None]
    computed = capture_of(model, whole, [MIDDLE, LAYERS], np.array([whole.shape[1]]), np.zeros(1, int)).hidden
    return all(
        np.allclose(computed[layer][0, PIECE - 1 :].astype(np.float32), hidden[layer][0].astype(np.float32), atol=2e-2)
        for layer in (MIDDLE, LAYERS)
    )


def split_text(tokens: NDArray[np.int32], length: int = 80) -> SplitText:
    """Windows of so many tokens, each a document of the train split."""
    count = len(tokens)
    return SplitText(
        [], np.zeros(count, np.int8), Windows(tokens, np.full(count, length, np.int32), np.arange(count, dtype=np.int32))
    )


def test_a_reply_ends_before_its_end_token() -> None:
    model = tiny_model("llama")
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.eos_token_id = list(range(0, 40, 2))
    loaded = LoadedModel(model, None, "tiny")
    capture = write_replies(loaded, split_text(np.full((4, 80), 5, np.int32)), [LAYERS], 2, seed=0).capture
    for tokens, length in zip(capture.tokens, capture.lengths, strict=True):
        assert not np.isin(tokens[1:length], model.generation_config.eos_token_id).any()
    assert (capture.lengths < NEW).any()
    with pytest.raises(DataError, match="give longer documents"):
        write_replies(loaded, split_text(np.zeros((4, 80), np.int32), 16), [LAYERS], 2, seed=0)


def test_a_model_with_a_chat_template_also_prompts_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: the head would know replies to the calibration's text only, and no other conversation."""
    monkeypatch.setattr(replies_module, "template_tokens", lambda loaded: ([5, 6, 9], [7]))
    text = split_text(np.full((4, 80), 11, np.int32))
    written = write_replies(LoadedModel(tiny_model("llama"), None, "tiny"), text, [LAYERS], 6, 0)
    capture = written.capture
    assert written.first_positions.tolist() == [43, 43, 43, 2, 2, 2]  # behind [5, 6, 9], 40 tokens of text and [7]
    assert capture.tokens[:, 0].tolist() == [7, 7, 7, 9, 9, 9]
    assert (capture.lengths[3:] == capture.tokens.shape[1]).all() and len({*map(bytes, capture.tokens[3:])}) == 3
