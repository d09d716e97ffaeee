"""What policy `exit` must say for one row, token by token, from states recomputed for the tokens it has said so far."""

from dataclasses import dataclass, field

import numpy as np
from runtime.tiny_generation import Request
from runtime.tiny_transformer import HIDDEN, Array, TinyTransformer
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.executor import max_probability
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.speculation.record import exit_backoff
from tide_runtime.sampler import Sampler


@dataclass
class SimulatedExit:
    """One row alone: no cache, no batch, no slots."""

    policy: ExitDepth
    manifest: Manifest
    model: TinyTransformer
    request: Request
    depths: list[int] = field(default_factory=list)
    reason: str | None = None

    def run(self) -> list[int]:
        """The new tokens; ``reason`` and ``depths`` (of each token after the first) are set on the way."""
        self.sampler = Sampler(self.request.params, self.model.vocab)
        tuning = self.policy.options.tuning
        self.backoff, self.streak = exit_backoff(tuning), 0
        self.tokens, self.deep = list(self.request.prompt), len(self.request.prompt)
        self.tails: dict[tuple[int, int], tuple[Array, Array]] = {}  # layer, position → a draft's keys and values
        self._say(self._prompt())
        while self.reason is None:
            self._step()
        return self.tokens[len(self.request.prompt) :]

    def _prompt(self) -> Array:
        return np.asarray(self.model.states_of(np.array(self.tokens)).logits[-1])

    def _step(self) -> None:
        newest = len(self.tokens) - 1
        states, last = self._newest()
        if newest - self.deep >= self.policy.options.tuning.exit_room - 1:
            self.deep = newest
        streaks, asked = self.policy.options.max_exit_streak, [0] * len(self.policy.stops)
        must_go_deep = 0 < streaks <= self.streak
        budget, layers = self.request.params.depth_budget, self.manifest.model.num_layers
        over = budget is not None and (sum(self.depths) + layers) / (len(self.depths) + 1) > budget
        for number, stop in enumerate([] if must_go_deep or (not self.backoff.active and not over) else self.policy.stops):
            asked[number] = 1
            least = -1.0 if over else stop.threshold
            score, logits = self._evaluate(stop.exit.info, least, states[stop.exit.info.checkpoint])
            if logits is not None and score >= least:
                self.depths.append(stop.exit.layers)
                self.streak += 1
                self.backoff.observe(1, self.policy.token_cost(asked, 0))
                return self._say(logits)
        waited, self.deep, self.streak = newest + 1 - self.deep, newest + 1, 0
        self.depths.append(self.manifest.model.num_layers)
        if not self.backoff.active:
            self.backoff.pass_tokens(1)
        else:
            self.backoff.observe(1, self.policy.token_cost([0 if must_go_deep else 1] * len(asked), waited))
        return self._say(last)

    def _newest(self) -> tuple[list[Array], Array]:
        """The last token's states after 0 … L layers, and its logits, over exact keys and values."""
        self.text = self.model.states_of(np.array(self.tokens))
        return [hidden[-1] for hidden in self.text.hidden], self.text.logits[-1]

    def _past(self, layer: int) -> tuple[Array, Array]:
        """Real keys and values of tokens that went deep, and the exits' own of those since, in a layer of the tail."""
        since = [self.tails[layer, position] for position in range(self.deep, len(self.tokens) - 1)]
        keys = [*self.text.keys[layer][: self.deep], *(k for k, _ in since)]
        return np.array(keys), np.array([*self.text.values[layer][: self.deep], *(v for _, v in since)])

    def _evaluate(self, info: ExitInfo, threshold: float, state: Array) -> tuple[float, Array | None]:
        score = float(self.model.score(info.checkpoint, state))
        gate = {"max_probability": 0.0, "mlp": threshold}.get(info.router, info.mlp_threshold if threshold >= 0 else threshold)
        if info.has_mlp and not score >= (gate or 0.0):
            return score, None
        if info.head != "identity":
            state = self.model.translated(info.checkpoint, state)
        for layer in range(self.manifest.model.num_layers - info.tail_layers, self.manifest.model.num_layers):
            keys, values = self._past(layer)
            self.tails[layer, len(self.tokens) - 1] = own = self.model.project(layer, state)
            state = self._attend(layer, state, (keys, values), own)
        logits = self.model.logits(state)
        return score if info.router == "mlp" else float(max_probability(logits[None])[0]), logits

    def _attend(self, layer: int, state: Array, past: tuple[Array, Array], own: tuple[Array, Array]) -> Array:
        keys, values = (np.concatenate([before.reshape(-1, HIDDEN), new[None]]) for before, new in zip(past, own, strict=True))
        return self.model.layer(layer, state[None], keys, values, np.ones((1, len(keys)), dtype=bool))[0]

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
