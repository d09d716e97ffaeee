"""Hypothesis strategies: small models cut and calibrated in every way, and requests that join, leave, stop and overflow."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from runtime.numpy_backend import NumpyBackend, tiny_manifest
from runtime.tiny_generation import Request
from runtime.tiny_transformer import TinyTransformer
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.options import DepthOptions
from tide_runtime.generation_params import GenerationParams

ROUTERS = ("max_probability", "mlp", "mlp+max_probability")


@dataclass(frozen=True)
class Case:
    """What varies from example to example.

    Args:
        price: factor on what asking exits is said to cost; where it is low they never rest.
        rest: tokens for which asking exits rests at first.
        room: most tokens that wait for depth in policy `exit`.
    """

    model: TinyTransformer
    manifest: Manifest
    requests: list[Request]
    capacity: int
    chunk: int
    options: DepthOptions
    price: float
    rest: int
    room: int

    def backend(self) -> NumpyBackend:
        return NumpyBackend(self.manifest, self.model)


@st.composite
def cases(draw: st.DrawFn, *, sampling: bool, positions: tuple[int, int] = (8, 25)) -> Case:
    """A bundle, options and requests.

    Numbers come from a seed: hypothesis prefers small and equal ones, with which all tokens of a batch stop at one depth.
    """
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers = draw(st.integers(4, 6))
    deep = draw(st.sampled_from([0.05, 0.3, 0.8]))  # how much the deeper half changes what the shallow one says
    strengths = tuple(0.5 if layer < layers // 2 else deep for layer in range(layers))
    model = TinyTransformer(int(random.integers(50)), strengths, int(random.integers(5, 18)), int(random.integers(*positions)))
    cuts = random.permutation(np.arange(1, layers))[: draw(st.sampled_from([1, 2, 3, 3]))]
    checkpoints = sorted(cuts.tolist())
    exits = random_exits(random, checkpoints, layers, draw(st.booleans()))
    options = DepthOptions(
        draft=draw(st.sampled_from(["all", "all", "router", "router", "ngram", "none"])),
        draft_limit=draw(st.none() | st.integers(1, 6)),
        max_wait_steps=draw(st.integers(0, 3)),
        threshold=draw(st.sampled_from([None, None, None, 0.0, 0.5, 1.0])),
        max_exit_streak=draw(st.sampled_from([0, 0, 1, 3])),
    )
    return Case(
        model=model,
        manifest=tiny_manifest(model, checkpoints, exits, draft_limit=int(random.integers(7))),
        requests=_requests(random, model, sampling),
        capacity=draw(st.sampled_from([1, 3, 5, 5])),
        chunk=int(random.integers(1, 9)),
        options=options,
        price=draw(st.sampled_from([0.1, 0.1, 1.0])),
        rest=draw(st.sampled_from([1, 2, 32])),
        room=draw(st.sampled_from([2, 5, 64])),
    )


def random_exits(random: np.random.Generator, checkpoints: list[int], layers: int, tails: bool) -> list[ExitInfo]:
    heads = ["identity", "linear"]
    if tails and len(checkpoints) > 1:
        heads = [f"tail:{layers - checkpoints[-1]}"]
        checkpoints = checkpoints[:-1]
    places = random.permutation(checkpoints)[: random.integers(1, len(checkpoints) + 1)]
    return [
        ExitInfo(
            place,
            str(random.choice(heads)),
            str(random.choice(ROUTERS)),
            exact_threshold=_probability(random),
            exit_threshold=_probability(random),
            mlp_threshold=_probability(random),
        )
        for place in sorted(places.tolist())
    ]


def _probability(random: np.random.Generator) -> float:
    return float(random.choice([0.0, 1.0])) if random.random() < 0.15 else float(random.uniform(0.2, 0.8))


def _requests(random: np.random.Generator, model: TinyTransformer, sampling: bool) -> list[Request]:
    requests = []
    for seat in range(random.integers(1, 10)):
        length = min(random.choice([1, 2, 3, 6, 10, 24]), model.positions)
        prompt = random.integers(0, model.vocab, length)
        if random.random() < 0.5:
            prompt = np.resize(prompt[: random.integers(1, 5)], length)  # repeats, for the n-gram drafter
        changes: dict[str, Any] = {}
        if random.random() < 0.3:
            changes["eos_token_ids"] = tuple(random.integers(0, model.vocab, 2).tolist())
        if sampling and random.random() < 0.5:
            changes |= {"temperature": 0.9, "top_p": 0.95, "seed": int(random.integers(99))}
        if random.random() < 0.2:
            changes["repetition_penalty"] = 1.3
        if random.random() < 0.2:
            changes["depth_budget"] = float(random.uniform(1, len(model.strengths)))
        count = int(random.choice([1, 3, 8, 30]))
        requests.append(Request(tuple(prompt.tolist()), GenerationParams(max_new_tokens=count, **changes), seat))
    return requests
