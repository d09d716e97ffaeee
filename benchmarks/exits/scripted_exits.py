"""Exits that answer by a script: the policies' machinery at any exit rate, on a model whose own exits know nothing.

Every graph runs as ever; only what the exit said is replaced. The router says yes at the given rate, and a draft is the
token that `full` said there, so what is drafted is accepted.
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
Texts = dict[tuple[int, ...], list[int]]  # prompt → what `full` said


class Script:
    """Yes or no, the first at ``rate`` (0 … 1), the same answers after every `rewind`."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self.rewind()

    def rewind(self) -> None:
        self._random = np.random.default_rng(0)

    def says_yes(self) -> bool:
        return bool(self._random.random() < self._rate)


class ScriptedExecutor(Executor):
    """Asks exits, and answers for them."""

    def __init__(self, manifest: Manifest, script: Script, said: Texts) -> None:
        super().__init__(manifest)
        self._script, self._said = script, said

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
        said = self._said[tuple(state.tokens[: state.sequence.prompt_tokens].tolist())]
        place = state.num_tokens_with_drafts - state.sequence.prompt_tokens
        token = said[place] if place < len(said) else guess.token
        return guess._replace(score=float(self._script.says_yes()), token=token)


class ScriptedArm:
    """Policy `exact` or `exit` with scripted exits. ``said``: `full`'s text for every prompt that will come."""

    most_groups: int | None = None

    def __init__(self, engine: LoggedEngine, policy: SkippingPolicy, manifest: Manifest, rate: float, said: Texts) -> None:
        self.engine, self._policy, self._script = engine, policy, Script(rate)
        policy.executor = ScriptedExecutor(manifest, self._script, said)

    def turn(self, prompts: Group, params: GenerationParams, rows: int) -> Turn:
        self._script.rewind()
        return self.engine.turn(self._policy, prompts, params, rows)

    def start(self, prompts: Group, params: GenerationParams, rows: int) -> EnginePlay:
        self._script.rewind()
        return self.engine.start(self._policy, prompts, params, rows)
