"""engine_soak: what it sends, and how it judges answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.serving.soak import Expected, first_turns, is_right, second_turns

ALONE = Expected((5, 6, 7, 8), "length")


def _done(tokens: tuple[int, ...], reason: str) -> Any:
    return SimpleNamespace(token_ids=tokens, finish_reason=reason)


@pytest.mark.parametrize(
    ("tokens", "reason", "chunks", "cancelled", "right"),
    [
        ((5, 6, 7, 8), "length", None, False, True),
        ((5, 6, 7, 8), "length", [5, 6, 7, 8], False, True),
        ((5, 6, 7), "length", None, False, False),  # tokens are missing
        ((5, 6, 7, 8, 9), "length", None, False, False),
        ((5, 6, 9, 8), "length", None, False, False),
        ((5, 6, 7, 8), "eos", None, False, False),  # another reason
        ((5, 6, 7, 8), "length", [5, 6], False, False),  # the stream lost tokens
        ((5, 6, 7, 8), "length", [5, 6], True, True),  # cancelled too late
        ((5, 6, 7, 8), "length", [5, 9], True, False),  # another one's stream
        ((5, 6), "cancelled", [5], True, True),
        ((), "deadline", None, False, True),
        ((5, 6), "deadline", None, False, True),
        ((5, 9), "deadline", None, False, False),
        ((5, 6, 7, 8, 9), "cancelled", None, True, False),  # longer than alone
    ],
)
def test_an_answer_is_right_when_it_is_the_text_alone_or_its_beginning(
    tokens: tuple[int, ...], reason: str, chunks: list[int] | None, cancelled: bool, right: bool
) -> None:
    """Texts that are mixed up, cut off or streamed wrongly would pass the soak."""
    assert is_right(_done(tokens, reason), chunks, ALONE, cancelled) is right


def test_a_third_is_sampled_with_seeds_and_prompts_share_beginnings() -> None:
    """The soak would test neither sampling in company nor the prefix cache."""
    texts = first_turns(300, 128, 0)
    sampled = [text.params for text in texts if text.params.temperature > 0]
    assert len(sampled) == 100 and len({params.seed for params in sampled}) == 100
    beginnings = [text.prompt[:24] for text in texts if len(text.prompt) > 24]
    assert max(beginnings.count(one) for one in set(beginnings)) > 10
    assert all(2 <= token < 128 for text in texts for token in text.prompt)
    assert texts == first_turns(300, 128, 0)


def test_second_turns_continue_answers_and_fit_the_model() -> None:
    """Keys and values of generated tokens would never be found again; or requests would be refused as too long."""
    first = first_turns(100, 128, 0)
    answers = [np.random.default_rng(i).integers(2, 128, 10).tolist() for i in range(100)]
    second = second_turns(first, answers, 30, 128, 128, 0)
    turns = {(*text.prompt, *answer) for text, answer in zip(first, answers, strict=True)}
    assert len(second) == 30
    assert all(any(text.prompt[: len(turn)] == turn for turn in turns) for text in second)
    assert all(len(text.prompt) + text.params.max_new_tokens <= 128 for text in second)
    with pytest.raises(ValueError, match="leave room"):
        second_turns(first, answers, 30, 128, 40, 0)
