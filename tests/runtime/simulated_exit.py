"""What policy `exit` must say for one row, token by token, from states recomputed for the tokens it has said so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from runtime.tiny_generation import Request
from runtime.tiny_transformer import Array, TextStates, TinyTransformer
from tide_runtime.calibration import ExitInfo
from tide_runtime.executor import max_probability
from tide_runtime.manifest import Manifest
from tide_runtime.policies.exit import ExitDepth
from tide_runtime.sampling import Sampler
from tide_runtime.trial import Trial


@dataclass
class SimulatedExit:
    """One row alone: no cache, no batch, no slots. ``room``: most tokens that may wait; ``rest``: as in `make_row`."""

    policy: ExitDepth
    manifest: Manifest
    model: TinyTransformer
    request: Request
    room: int
    rest: int = 32
    depths: list[int] = field(default_factory=list)
    reason: str | None = None

    def run(self) -> list[int]:
        """The new tokens; ``reason`` and ``depths`` (of each token after the first) are set on the way."""
        self.sampler = Sampler(self.request.params, self.model.vocab, self.request.seat)
        self.trial, self.streak = Trial(next_rest=self.rest), 0
        self.tokens, self.deep = list(self.request.prompt), len(self.request.prompt)
        self.tails: dict[tuple[int, int], tuple[Array, Array]] = {}  # layer, position → a draft's keys and values
        self._say(self.model.states_of(np.array(self.tokens)).logits[-1])
        while self.reason is None:
            self._step()
        return self.tokens[len(self.request.prompt) :]

    def _step(self) -> None:
        text, newest = self.model.states_of(np.array(self.tokens)), len(self.tokens) - 1
        if newest - self.deep >= self.room - 1:
            self.deep = newest
        streaks, asked = self.policy.options.max_exit_streak, [0] * len(self.policy.stops)
        tired = 0 < streaks <= self.streak
        for number, stop in enumerate([] if tired or self.trial.resting else self.policy.stops):
            asked[number] = 1
            score, logits = self._ask(stop.exit.info, stop.threshold, text, newest)
            if logits is not None and score >= stop.threshold:
                self.depths.append(stop.exit.info.checkpoint)
                self.streak += 1
                self.trial.saw(1, self.policy._cost(asked, 0))
                return self._say(logits)
        waited, self.deep, self.streak = newest + 1 - self.deep, newest + 1, 0
        self.depths.append(self.manifest.model.num_layers)
        if self.trial.resting:
            self.trial.rest(1)
        else:
            self.trial.saw(1, self.policy._cost([0 if tired else 1] * len(asked), waited))
        return self._say(text.logits[newest])

    def _ask(self, info: ExitInfo, threshold: float, text: TextStates, newest: int) -> tuple[float, Array | None]:
        state = text.hidden[info.checkpoint][newest]
        score = float(self.model.score(info.checkpoint, state))
        gate = {"max_probability": 0.0, "mlp": threshold}.get(info.router, info.mlp_threshold)
        if info.asks_mlp and not score >= (gate or 0.0):
            return score, None
        if info.head != "identity":
            state = self.model.translated(info.checkpoint, state)
        for layer in range(self.manifest.model.num_layers - info.tail_layers, self.manifest.model.num_layers):
            state = self._tail_layer(layer, state, text, newest)
        logits = self.model.logits(state)
        return score if info.router == "mlp" else float(max_probability(logits[None])[0]), logits

    def _tail_layer(self, layer: int, state: Array, text: TextStates, newest: int) -> Array:
        """Attends to real keys and values of tokens that went deep, and to the exits' own of those since."""
        self.tails[layer, newest] = self.model.project(layer, state)
        since = [self.tails[layer, position] for position in range(self.deep, newest + 1)]
        keys = np.concatenate([text.keys[layer][: self.deep], [k for k, _ in since]])
        values = np.concatenate([text.values[layer][: self.deep], [v for _, v in since]])
        return self.model.layer(layer, state[None], keys, values, np.ones((1, newest + 1), dtype=bool))[0]

    def _say(self, logits: Array) -> None:
        params = self.request.params
        token = self.sampler.sample(logits.astype(np.float32), np.array(self.tokens))
        self.tokens.append(token)
        if token in (params.eos_token_ids or ()):
            self.reason = "eos"
        elif len(self.tokens) - len(self.request.prompt) >= params.max_new_tokens:
            self.reason = "length"
        elif len(self.tokens) > self.manifest.max_seq_len:
            self.reason = "cache_full"
