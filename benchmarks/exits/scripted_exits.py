"""Exits with scripted results: the policies' own work at any exit rate, on a model whose exits are random.

Every graph runs as usual; only the results of exits are replaced. The router accepts at the given rate, and a draft is the
token that `full` generated there, so every draft is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tide_runtime import GenerationParams
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.exits import Exit
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.exact import ExactDepth
from tide_runtime.depth.executor import Executor, Guess
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.frontier import LazySequence

from benchmarks.arms.engine_arm import EnginePlay, LoggedEngine
from benchmarks.arms.turns import Group, Turn

SkippingPolicy = ExactDepth | ExitDepth
Texts = dict[tuple[int, ...], list[int]]  # prompt → `full`'s text


class Script:
    """Random decisions, a share ``rate`` (0 … 1) of them to exit; the same ones after every `rewind`."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self.rewind()

    def rewind(self) -> None:
        self._random = np.random.default_rng(0)

    def accepts(self) -> bool:
        return bool(self._random.random() < self._rate)


class ScriptedExecutor(Executor):
    """Evaluates exits, and replaces their results."""

    def __init__(self, manifest: Manifest, script: Script, texts: Texts) -> None:
        super().__init__(manifest)
        self._script, self._texts = script, texts

    def evaluate(
        self,
        context: ExecutionContext,
        sequences: Sequence[LazySequence],
        chosen: Sequence[int],
        early_exit: Exit,
        least: Sequence[float],
    ) -> list[Guess]:
        guesses = super().evaluate(context, sequences, chosen, early_exit, least)
        return [self._answer(sequences[i], guess) for i, guess in zip(chosen, guesses, strict=True)]

    def _answer(self, state: LazySequence, guess: Guess) -> Guess:
        prompt_tokens = state.sequence.prompt_tokens
        text = self._texts[tuple(state.tokens[:prompt_tokens].tolist())]
        place = state.num_tokens_with_drafts - prompt_tokens
        token = text[place] if place < len(text) else guess.token
        return guess._replace(score=float(self._script.accepts()), token=token)


class ScriptedArm:
    """Policy `exact` or `exit` with scripted exits. ``texts``: `full`'s text for every prompt."""

    most_groups: int | None = None

    def __init__(self, engine: LoggedEngine, policy: SkippingPolicy, manifest: Manifest, rate: float, texts: Texts) -> None:
        self.engine, self._policy, self._script = engine, policy, Script(rate)
        policy.executor = ScriptedExecutor(manifest, self._script, texts)

    def turn(self, prompts: Group, params: GenerationParams, rows: int) -> Turn:
        self._script.rewind()
        return self.engine.turn(self._policy, prompts, params, rows)

    def start(self, prompts: Group, params: GenerationParams, rows: int) -> EnginePlay:
        self._script.rewind()
        return self.engine.start(self._policy, prompts, params, rows)
