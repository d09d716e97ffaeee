"""Requests that stay in a loop on the device give the tokens that the host would choose one by one."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from runtime.device_loop.test_decode_loop import EXITS, MODEL, PROMPTS, Driven
from runtime.tiny_generation import Request, make_row
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
