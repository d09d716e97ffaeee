"""The search for prompts that mislead the depth policies."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from tide_runtime import Engine, Generation

from benchmarks.adversarial_depth import PROMPT_TOKENS, mutated, search


class Echo:
    """An engine whose result is its prompt."""

    manifest = SimpleNamespace(model=SimpleNamespace(vocab_size=50))

    def generate(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
        return [SimpleNamespace(token_ids=tuple(prompt)) for prompt in prompts]


def count_of_sevens(result: Generation) -> float:
    return result.token_ids.count(7)


def test_a_search_gets_better_and_finds_the_same_again() -> None:
    """Breaks: the worst prompt found would be a random one, or another in every run."""
    engine = cast(Engine, Echo())
    first, longer, again = (search(engine, count_of_sevens, count, 1, "") for count in (1, 60, 60))
    assert longer.fitness > first.fitness + 10
    assert longer == again
    assert count_of_sevens(cast(Any, SimpleNamespace(token_ids=tuple(longer.prompt)))) == longer.fitness


def test_mutations_keep_prompts_valid() -> None:
    """Breaks: prompts that the engine refuses in the middle of a search."""
    random = np.random.default_rng(0)
    prompt = random.integers(0, 50, PROMPT_TOKENS)
    for _ in range(300):
        before = prompt.copy()
        new = mutated(prompt, random, 50)
        assert new.shape == (PROMPT_TOKENS,) and 0 <= new.min() <= new.max() < 50
        assert (prompt == before).all()
        prompt = new
