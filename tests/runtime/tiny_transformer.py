"""A transformer in NumPy, small enough to recompute everything: the reference for what caches and states must hold.

Float64, one attention head, random weights by seed. ``states_of`` computes a whole text from scratch, without any cache.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
HIDDEN = 8


@dataclass(frozen=True)
class TextStates:
    """States of a text of T tokens: ``hidden[n]`` [T, H] after n layers, ``keys`` and ``values`` [L, T, H], ``logits`` [T, V]."""

    hidden: list[Array]
    keys: Array
    values: Array
    logits: Array


@dataclass(frozen=True)
class TinyTransformer:
    """``strengths``: how much each layer adds to the residual stream; 0 silences it."""

    seed: int
    strengths: tuple[float, ...]
    vocab: int
    positions: int
    weights: dict[str, Array] = field(init=False)
    _texts: dict[tuple[int, ...], TextStates] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocab, HIDDEN), "position": (self.positions + 1, HIDDEN)}
        shapes["head"] = (HIDDEN, self.vocab)
        for layer in range(len(self.strengths)):
            shapes |= {f"{name}.{layer}": (HIDDEN, HIDDEN) for name in ("query", "key", "value", "out", "up", "down")}
            shapes |= {f"translate.{layer}": (HIDDEN, HIDDEN), f"router.{layer}": (HIDDEN,)}
        weights = {name: random.normal(size=shape) * HIDDEN**-0.5 for name, shape in shapes.items()}
        weights["embedding"] *= 3.0
        weights["head"] *= 2.0
        object.__setattr__(self, "weights", weights)

    def embed(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> Array:
        return np.asarray(self.weights["embedding"][tokens] + self.weights["position"][positions])

    def project(self, layer: int, hidden: Array) -> tuple[Array, Array]:
        """Keys and values of ``layer`` for its input states [..., H]."""
        normed = _normed(hidden)
        return normed @ self.weights[f"key.{layer}"], normed @ self.weights[f"value.{layer}"]

    def layer(self, layer: int, hidden: Array, keys: Array, values: Array, visible: NDArray[np.bool_]) -> Array:
        """States [..., S, H] after ``layer``, attending to keys and values [..., T, H] where ``visible`` [..., S, T]."""
        weights, strength = self.weights, self.strengths[layer]
        scores = _normed(hidden) @ weights[f"query.{layer}"] @ np.swapaxes(keys, -1, -2)
        scores = np.where(visible, scores, -np.inf)
        attention = np.exp(scores - scores.max(-1, keepdims=True))
        attention /= attention.sum(-1, keepdims=True)
        hidden = hidden + strength * (attention @ values @ weights[f"out.{layer}"])
        return np.asarray(hidden + strength * np.tanh(_normed(hidden) @ weights[f"up.{layer}"]) @ weights[f"down.{layer}"])

    def logits(self, hidden: Array) -> Array:
        return np.asarray(_normed(hidden) @ self.weights["head"])

    def translated(self, checkpoint: int, hidden: Array) -> Array:
        """What the translator of the exit after ``checkpoint`` layers makes of a state."""
        return np.asarray(hidden + 0.2 * _normed(hidden) @ self.weights[f"translate.{checkpoint}"])

    def score(self, checkpoint: int, hidden: Array) -> Array:
        """The MLP router: steep, so that scores are spread over 0 … 1."""
        return np.asarray(1.0 / (1.0 + np.exp(-3.0 * np.tanh(_normed(hidden)) @ self.weights[f"router.{checkpoint}"])))

    def states_of(self, tokens: NDArray[np.int64]) -> TextStates:
        """Everything about a text [T], from scratch."""
        text = tuple(tokens.tolist())
        if text not in self._texts:
            hidden, keys, values = [self.embed(tokens, np.arange(len(text)))], [], []
            for layer in range(len(self.strengths)):
                k, v = self.project(layer, hidden[-1])
                hidden.append(self.layer(layer, hidden[-1], k, v, np.tri(len(text), dtype=bool)))
                keys.append(k)
                values.append(v)
            self._texts[text] = TextStates(hidden, np.stack(keys), np.stack(values), self.logits(hidden[-1]))
        return self._texts[text]

    def full_logits(self, tokens: NDArray[np.int64]) -> Array:
        """Logits [T, V] of a text [T], from scratch."""
        return self.states_of(tokens).logits


def _normed(hidden: Array) -> Array:
    return np.asarray(hidden / np.sqrt((hidden * hidden).sum(-1, keepdims=True) / HIDDEN + 1e-6))
