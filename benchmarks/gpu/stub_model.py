"""A language model of integers for checks of decode loops: states are hashes, so that any token, position, cache slot or layer
that is missed or taken twice changes every later token. Recomputed from scratch in Python, it says what a loop must generate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp

from tide_runtime.bundle.calibration import CalibrationInfo, ExitInfo
from tide_runtime.bundle.manifest import (
    HEAD,
    SCHEMA_VERSION,
    GenerationInfo,
    GraphInfo,
    KVInfo,
    LayerInfo,
    Manifest,
    ModelInfo,
    exit_graph,
    kv_fill_graph,
)

LAYERS, VOCAB, SLOTS = 4, 11, 64
STATE_WORDS = 4  # 64-bit words of a hidden state, one of which is the hash; the others must follow from it
_WORD = 2**64 - 1
_UNIT = 2.0**-24  # scores and logits have 24 bits, so that they are the same in float32 and here
_LOGIT_RANGE = 4.0
_STEPS = {"layer": 0x1000193, "logit": 0x2545F491, "score": 0x9E3779B1, "translate": 0x85EBCA6B}


def mix(value: int) -> int:
    """A 64-bit hash (splitmix64, Steele et al. 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _WORD
    return value ^ value >> 31


def embed(token: int, position: int) -> int:
    return mix(31 * token + position)


def layer(number: int, state: int, key_before: int, value_before: int) -> int:
    """State after a layer; it is also the key of its slot, and its hash the value."""
    return mix(state + _STEPS["layer"] * (number + 1) + key_before + 3 * value_before)


def logit(state: int, token: int) -> float:
    return _fraction(mix(state + _STEPS["logit"] * (token + 1))) * _LOGIT_RANGE


def score(depth: int, state: int) -> float:
    return _fraction(mix(state + _STEPS["score"] * depth))


def translated(depth: int, state: int) -> int:
    return mix(state + _STEPS["translate"] * depth)


def _fraction(value: int) -> float:
    return (value >> 40) * _UNIT


@dataclass(frozen=True)
class Wanted:
    """A prompt and what ends its text."""

    prompt: tuple[int, ...]
    new_tokens: int
    eos: tuple[int, ...] = ()


def reference(wanted: Wanted, exits: Sequence[ExitInfo]) -> list[int]:
    """The tokens that a loop must generate when every token may take one of ``exits``."""
    text = list(wanted.prompt)
    while len(text) - len(wanted.prompt) < wanted.new_tokens and len(text) <= SLOTS:
        states = _states(text)
        exiting = (token for info in exits if (token := _exit_token(info, states[info.checkpoint])) is not None)
        deep = _likeliest(states[LAYERS])
        text.append(deep if len(text) == len(wanted.prompt) else next(exiting, deep))  # the prompt's last token takes all layers
        if text[-1] in wanted.eos:
            break
    return text[len(wanted.prompt) :]


def _states(text: Sequence[int]) -> list[int]:
    """States of the last token before layer 0, …, after the last."""
    keys, values, states = [0] * LAYERS, [0] * LAYERS, list[int]()
    for position, token in enumerate(text):
        states = [embed(token, position)]
        for number in range(LAYERS):
            states.append(layer(number, states[-1], keys[number], values[number]))
            keys[number], values[number] = states[-1], mix(states[-1])
    return states


def _exit_token(info: ExitInfo, state: int) -> int | None:
    """The exit's token, or None if its router does not let the state exit."""
    assert info.exit_threshold is not None
    head = state if info.head == "identity" else translated(info.checkpoint, state)
    token = _likeliest(head)
    if info.router == "mlp":
        return token if score(info.checkpoint, state) >= info.exit_threshold else None
    if info.mlp_threshold is not None and score(info.checkpoint, state) < info.mlp_threshold:
        return None
    return (
        token if 1 / sum(exp(logit(head, other) - logit(head, token)) for other in range(VOCAB)) >= info.exit_threshold else None
    )


def _likeliest(state: int) -> int:
    return max(range(VOCAB), key=lambda token: logit(state, token))


def stub_manifest(exits: Sequence[ExitInfo]) -> Manifest:
    """Segments of one layer, or two where no exit is between them."""
    checkpoints = sorted({1, 3, *(info.checkpoint for info in exits)})
    return Manifest(
        schema=SCHEMA_VERSION,
        created="",
        tools={},
        model=ModelInfo("stub", "stub", None, "Stub", "stub", LAYERS, 2 * STATE_WORDS, VOCAB, 0, 0, ""),
        dtype="fp32",
        max_seq_len=SLOTS,
        checkpoints=checkpoints,
        layers=[LayerInfo(KVInfo(1, 2, 2))] * LAYERS,  # two floats hold a word
        graphs=list(_graphs([0, *checkpoints, LAYERS], exits)),
        targets={},
        generation=GenerationInfo([]),
        calibration=CalibrationInfo(list(exits), 4, "exit"),
    )


def _graphs(edges: Sequence[int], exits: Sequence[ExitInfo]) -> Iterator[GraphInfo]:
    for number, (first, end) in enumerate(pairwise(edges)):
        yield GraphInfo(f"segment_{number}", [first, end], 0, [], [])
    for info in exits:
        if info.graph_outputs():
            yield GraphInfo(exit_graph(info), None, 0, [], [])
        yield GraphInfo(kv_fill_graph(info), None, 0, [], [])
    yield GraphInfo(HEAD, None, 0, [], [])
