"""Train the draft head on the model's own replies, and measure how often its guesses are right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import DraftHeadInfo
from tide_runtime.errors import CalibrationError
from torch import Tensor

from tide_calibrate.capture.batches import in_batches, read_batch
from tide_calibrate.capture.store import Capture
from tide_calibrate.draft_head.head import DraftHead
from tide_calibrate.draft_head.replies import Replies
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.parallel import wait_for
from tide_export.drafters.guesses import GUESSES, GuessRecord

VOCABULARY = 4096  # SmolLM2: 38.5% of guesses right among so many tokens, 39.2% among all 49,152
# SmolLM2, 96 replies, a minute: 33.9% right with 320 steps of 2 windows at this rate, 31.3% with 160 steps of 4, 27.1% at 6e-4.
WINDOWS_PER_STEP = 2
LEARNING_RATE = 2e-3
STEPS = (40, 60, 100, 160, 250, 400, 600, 1000, 1600, 2500, 4000)  # few numbers: two runs on one machine train the same
# The head's own states stand in for the model's from the second guess on, so it is trained to go on from them.
LOSS_WEIGHTS = (1.0, 0.7, 0.5)
_HELD_OUT = 0.1  # share of the replies that is held out
_NO_RATE = 1 << 30  # steps, of which the first ones warm the learning rate up


@dataclass(frozen=True)
class TrainedDraftHead:
    head: DraftHead
    info: DraftHeadInfo


@dataclass(frozen=True)
class _Chain:
    """Consecutive guesses of B windows: their states before the head's gain, and what the model said.

    Args:
        states: [B, T, H].
        top_ids, top_logits, logsumexp: of the tokens guessed.
        tokens: [B, T] that the text goes on with.
        valid: [B, T].
    """

    states: Tensor
    top_ids: Tensor
    top_logits: Tensor
    logsumexp: Tensor
    tokens: Tensor
    valid: Tensor


def draft_vocabulary(text: Capture, replies: Capture, vocab_size: int, size: int = VOCABULARY) -> Tensor:
    """The most frequent tokens of the training text and the replies, [N] int64; of equally frequent ones those of low ids."""
    counts = np.zeros(vocab_size, np.int64)
    for capture in (text, replies):
        windows = capture.split == 0
        valid = np.arange(capture.tokens.shape[1]) < capture.lengths[windows, None]
        counts += np.bincount(capture.tokens[windows][valid], minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[: min(size, vocab_size)]))


def train_draft_head(
    model: FrozenModel,
    text: Capture,
    replies: Replies,
    layer: int,
    seconds: float,
    max_steps: int = STEPS[-1],
    seed: int = 0,
    on_step: Callable[[int, int], None] = lambda done, steps: None,
) -> TrainedDraftHead:
    """Train in the largest number of `STEPS` up to ``max_steps`` that takes at most ``seconds``, by the time of the first ones.

    Args:
        text: of the training split; with the replies it tells how frequent tokens are.
        layer: layers run before the state in the middle, which the replies hold.
        on_step: called with the steps done and all of them.

    Raises UnsupportedModelError where `DraftHead` does,
    CalibrationError for a loss that is not finite.
    """
    torch.manual_seed(seed)
    capture = replies.capture
    order = np.random.default_rng(seed).permutation(np.flatnonzero(capture.lengths > len(LOSS_WEIGHTS)))
    held_out, own = np.split(order, [max(1, round(_HELD_OUT * len(order)))])
    vocabulary = draft_vocabulary(text, capture, model.model.config.get_text_config().vocab_size).to(model.device)
    final = capture.num_layers
    sample = torch.from_numpy(capture.hidden[final][own[:8], : capture.lengths[own[:8]].min()]).flatten(0, 1).float()
    head = DraftHead(model, layer, vocabulary, sample.to(model.device), seed)
    place = torch.full((model.model.config.get_text_config().vocab_size,), -1, device=model.device)
    place[vocabulary] = torch.arange(len(vocabulary), device=model.device)
    trainer = _Trainer(head, place, replies, own, seed)
    steps = trainer.plan(seconds, max_steps)
    for step in range(steps):
        trainer.step(step, steps)
        on_step(step + 1, steps)
    return TrainedDraftHead(head, measure_guesses(head, replies, held_out))


class _Trainer:
    def __init__(self, head: DraftHead, place: Tensor, replies: Replies, windows: NDArray[np.int64], seed: int) -> None:
        self.head = head
        self.place = place
        self.replies = replies
        self.windows = windows
        self._random = np.random.default_rng(seed)
        self._optimizer = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))

    def plan(self, seconds: float, max_steps: int) -> int:
        """The number of steps for ``seconds``, up to ``max_steps``, by the time of a step after a first one, at a rate near 0."""
        times = []
        for step in range(3):
            start = perf_counter()
            self.step(step, _NO_RATE)
            wait_for(self.head.model.device)
            times.append(perf_counter() - start)
        return max((steps for steps in STEPS if steps <= max_steps and steps * min(times[1:]) <= seconds), default=STEPS[0])

    def step(self, step: int, steps: int) -> None:
        chosen = self._random.choice(self.windows, min(WINDOWS_PER_STEP, len(self.windows)), replace=False)
        loss = torch.zeros((), device=self.head.model.device)
        for weight, link in zip(LOSS_WEIGHTS, chain(self.head, self.replies, chosen, len(LOSS_WEIGHTS)), strict=False):
            loss = loss + weight * self._loss(link)
        if not torch.isfinite(loss):
            raise CalibrationError(f"training the draft head gave a loss of {loss.item()} in step {step}; capture again in fp32")
        warm_up = max(1, min(30, steps // 10)) if steps != _NO_RATE else _NO_RATE
        rate = min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self._optimizer.step()

    def _loss(self, link: _Chain) -> Tensor:
        """Cross entropy with the model's largest probabilities, of those tokens that the head can guess."""
        logits = self.head.logits(link.states[link.valid]).log_softmax(-1)
        place = self.place[link.top_ids[link.valid]]
        likely = (link.top_logits[link.valid] - link.logsumexp[link.valid][:, None]).exp() * (place >= 0)
        return -(likely * logits.gather(1, place.clamp(min=0))).sum(-1).mean()


def chain(head: DraftHead, replies: Replies, windows: NDArray[np.int64], length: int) -> list[_Chain]:
    """``length`` guesses after every token of ``windows``, each from the state of the guess before, along the text."""
    capture = replies.capture
    final = replies.capture.num_layers
    device = head.model.device
    batch = read_batch(capture, windows, [head.layer, final], device)
    tokens = torch.from_numpy(capture.tokens[windows, : batch.valid.shape[1]].astype(np.int64)).to(device)
    embedded = head.embedded(tokens, torch.from_numpy(replies.first_positions[windows]).to(device))
    middle = batch.states[head.layer]
    state = batch.states[final]
    links = []
    for ahead in range(1, length + 1):
        # The state of token t and token t + ahead give the guess of token t + ahead + 1, which the model chose at t + ahead.
        kept = tokens.shape[1] - ahead
        if kept < 1:
            break
        middle = state = head(embedded[:, ahead:], middle[:, :kept], state[:, :kept])
        following = torch.cat([tokens[:, ahead + 1 :], torch.full((len(tokens), 1), -1, device=device)], 1)
        links.append(
            _Chain(
                state,
                batch.top_ids[:, ahead:],
                batch.top_logits[:, ahead:],
                batch.logsumexp[:, ahead:],
                following,
                batch.valid[:, ahead:],
            )
        )
    return links


@torch.no_grad()
def measure_guesses(head: DraftHead, replies: Replies, windows: NDArray[np.int64]) -> DraftHeadInfo:
    """How often guesses on ``windows`` are the model's likeliest token, while all guesses before are right."""
    record = GuessRecord()
    for part in in_batches(windows, WINDOWS_PER_STEP):
        before: Tensor | None = None
        for place, link in enumerate(chain(head, replies, part, GUESSES)):
            best = head.logits(link.states).softmax(-1).max(-1)
            choices = link.top_ids[..., 0]
            right = head.vocabulary[best.indices] == choices
            counted = link.valid if before is None else link.valid & before[:, : link.valid.shape[1]]
            record.add(place, best.values, right, counted)
            # The next guess follows a right one, on a text that goes on with it.
            before = counted & right & (link.tokens == choices)
    layers = [head.layer, replies.capture.num_layers]
    width = 2 * head.model.hidden_size
    return DraftHeadInfo(layers, width, len(head.vocabulary), record.acceptance, record.classes)
