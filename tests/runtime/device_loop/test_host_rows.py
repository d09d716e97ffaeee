"""Requests that stay in a loop on the device give the tokens that the host would choose one by one."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from runtime.device_loop.test_decode_loop import EXITS, MODEL, PROMPTS, Driven
from runtime.device_loop.test_plugin_kernels import with_real_kernels
from runtime.tiny_generation import Request, make_row
from tide_runtime.backends.device.element_types import FP32
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.generation_params import GenerationParams
from tide_runtime.scheduling.step import run
from tide_runtime.sequence import TokenSequence
from tide_runtime.text.tokenizer import TextStream, Tokenizer
from tokenizers import models

LETTERS = Tokenizer(tokenizers.Tokenizer(models.BPE({"abcdefghijk"[i]: i for i in range(MODEL.vocab)}, [])))


def texts(driven: Driven, params: list[GenerationParams], capacity: int, on_host: bool) -> list[TokenSequence]:
    """Finished sequences of `PROMPTS`; ``on_host``: every token is decided by the policy inside the loop's."""
    policy: Any = driven.policy.inner if on_host else driven.policy
    rows = [make_row(Request(PROMPTS[seat], one, seat), driven.manifest) for seat, one in enumerate(params)]
    for row in rows:
        row.text = TextStream(LETTERS, row.params.stop)
    for _ in run(policy, driven.backend.context(capacity), rows):  # type: ignore[arg-type]
        pass
    return rows


def outcome(row: TokenSequence) -> tuple[object, ...]:
    return row.new_tokens.tolist(), row.finish_reason, "".join(row.pieces), row.depth.token_depths, row.num_tokens


def rows_of_host(driven: Driven) -> list[int]:
    """The number of sequences in each decode step that the host decides from now on."""
    inner, step, seen = driven.policy.inner, driven.policy.inner.step, list[int]()

    def counted(context: Any, decoding: Any, prompts: Any) -> list[list[int]]:
        seen.append(len(decoding))
        return step(context, decoding, prompts)

    inner.step = counted  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("exits", EXITS.values(), ids=EXITS)
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("capacity", [1, 3])
def test_stop_strings_end_texts_as_on_the_host(exits: tuple[ExitInfo, ...], compile: bool, capacity: int) -> None:
    """Guards against text behind a stop string that a launch has generated, and against rows that the host decodes for one."""
    plain = [GenerationParams(max_new_tokens=n) for n in (30, 25, 20, 30, 30)]
    whole = ["".join(row.pieces) for row in texts(Driven(exits), plain, capacity, on_host=True)]
    stops = [(whole[0][6:9],), (whole[1][2],), ("none of it",), (whole[3][17:19], "?"), (whole[4][0],)]
    params = [GenerationParams(max_new_tokens=one.max_new_tokens, stop=stop) for one, stop in zip(plain, stops, strict=True)]
    driven = Driven(exits, compile)
    decided = rows_of_host(driven)
    found = texts(driven, params, capacity, on_host=False)
    assert [*map(outcome, found)] == [*map(outcome, texts(Driven(exits), params, capacity, on_host=True))]
    assert {row.finish_reason for row in found} == {"stop", "length"} and sum(decided) == 0


SAMPLED = [
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "seed": 4},
    {},
    {"temperature": 1.5, "min_p": 0.1, "seed": 5},
    {"temperature": 0.3, "top_p": 0.8, "seed": 6},
]


def sampled(exits: tuple[ExitInfo, ...]) -> list[GenerationParams]:
    """Settings of every kind, one of them greedy, side by side; the first ends at a stop string."""
    params = [GenerationParams(max_new_tokens=n, **one) for n, one in zip((30, 9, 25, 30, 30), SAMPLED, strict=True)]  # type: ignore[arg-type]
    [first, *_] = texts(Driven(exits), params, 1, on_host=True)
    return [GenerationParams(max_new_tokens=30, stop=("".join(first.pieces)[8:11],), **SAMPLED[0]), *params[1:]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "real", "capacity"),
    [
        *((name, False, capacity) for name in EXITS for capacity in (1, 5)),
        *((name, True, 3) for name in ("none", "both", "three")),
    ],
)
def test_sampled_texts_are_those_of_the_host(name: str, real: bool, capacity: int) -> None:
    """Guards against sampled requests that the host decodes, and against texts that depend on who draws."""
    exits = EXITS[name]
    driven, params = Driven(exits, logits=FP32), sampled(exits)
    driven = with_real_kernels(driven, order=capacity) if real else driven
    decided = rows_of_host(driven)
    found = texts(driven, params, capacity, on_host=False)
    assert [*map(outcome, found)] == [*map(outcome, texts(Driven(exits, logits=FP32), params, capacity, on_host=True))]
    assert found[0].finish_reason == "stop" and driven.gpu.graph_launches and sum(decided) == 0


@pytest.mark.parametrize("exits", EXITS.values(), ids=EXITS)
@pytest.mark.parametrize(("capacity", "doubt"), [(1, 1), (1, 3), (3, 5), (5, 4)])
def test_the_host_decides_tokens_in_doubt(exits: tuple[ExitInfo, ...], capacity: int, doubt: int) -> None:
    """Guards against lost or repeated tokens, missing keys and values, and rows that wait for others to end, where the device
    leaves a token to the host."""
    driven, params = Driven(exits, doubt=doubt), sampled(exits)
    decided = rows_of_host(driven)
    found = texts(driven, params, capacity, on_host=False)
    assert [*map(outcome, found)] == [*map(outcome, texts(Driven(exits), params, capacity, on_host=True))]
    tokens = sum(len(row.new_tokens) for row in found if not row.params.greedy)
    assert sum(decided) > 0
    assert exits or sum(decided) <= tokens  # what the host decides at an exit may wait there, and all others with it
