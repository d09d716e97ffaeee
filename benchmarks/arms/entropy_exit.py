"""Policy ``exit`` routed by entropy instead of confidence: the same exits, the same share of tokens taken at each.

The runtime's routers take the exit head's largest probability as their score. This one takes exp(-entropy), 1 for a one-hot
distribution and 1/V for a uniform one, at the thresholds that accept as many tokens, so that only the choice of tokens differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.exits import Exit
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.executor import Executor, Guess
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.frontier import LazySequence
from tide_runtime.errors import ParamsError

Answers = dict[int, list[tuple[float, float]]]  # boundary → (largest probability, sureness) of every answer


def sureness(logits: NDArray[np.floating]) -> float:
    """exp(-entropy) of the softmax of ``logits`` [V], 1/V … 1; NaN when they hold one."""
    shifted = logits.astype(np.float64) - logits.max()
    weights = np.exp(shifted)
    total = weights.sum()
    return float(np.exp((weights * shifted).sum() / total) / total)


def matched_threshold(answers: Sequence[tuple[float, float]], threshold: float) -> float:
    """The sureness from which on as many of ``answers`` are taken as with a largest probability of ``threshold``."""
    taken = sum(probability >= threshold for probability, _ in answers)
    by_sureness = sorted((sure for _, sure in answers), reverse=True)
    return by_sureness[taken - 1] if taken else 1.0


def listening_exit(manifest: Manifest, policy: ExitDepth) -> Answers:
    """Record the results of the exits of ``policy`` from now on."""
    answers: Answers = {}
    policy.executor = _Listener(manifest, answers)
    return answers


def entropy_exit(manifest: Manifest, policy: ExitDepth, answers: Answers) -> ExitDepth:
    """Make ``policy`` route by entropy, at thresholds that match its own on ``answers``. Raises ParamsError for an MLP router."""
    if any(stop.exit.info.router == "mlp" for stop in policy.stops):
        raise ParamsError("the calibration chose an MLP router, which does not look at the head's probabilities")
    policy.stops = [
        replace(stop, threshold=matched_threshold(answers.get(stop.exit.boundary, []), stop.threshold)) for stop in policy.stops
    ]
    policy.executor = _EntropyExecutor(manifest)
    return policy


class _Listener(Executor):
    def __init__(self, manifest: Manifest, answers: Answers) -> None:
        super().__init__(manifest)
        self._answers = answers

    def evaluate(
        self,
        context: ExecutionContext,
        sequences: Sequence[LazySequence],
        chosen: Sequence[int],
        early_exit: Exit,
        least: Sequence[float],
    ) -> list[Guess]:
        guesses = super().evaluate(context, sequences, chosen, early_exit, least)
        heard = [(guess.score, sureness(guess.logits)) for guess in guesses if guess.logits is not None]
        self._answers.setdefault(early_exit.boundary, []).extend(heard)
        return guesses


class _EntropyExecutor(Executor):
    def evaluate(
        self,
        context: ExecutionContext,
        sequences: Sequence[LazySequence],
        chosen: Sequence[int],
        early_exit: Exit,
        least: Sequence[float],
    ) -> list[Guess]:
        guesses = super().evaluate(context, sequences, chosen, early_exit, least)
        return [guess if guess.logits is None else guess._replace(score=sureness(guess.logits)) for guess in guesses]
