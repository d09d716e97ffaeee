"""Compare a finished bundle with the eager model: logits and greedy tokens of real prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tide_runtime import Engine, EngineOptions, GenerationParams
from tide_runtime.errors import VerificationError

from tide_export.load import LoadedModel

PROMPTS = (
    "def binary_search(items, target):\n    ",
    "The quick brown fox jumps over the lazy dog. In the beginning",
    'import json\n\n\nclass Config:\n    """Settings read from a file."""\n\n    def __init__(self, path):\n',
    "Q: What is the capital of France?\nA:",
)
GREEDY_TOKENS = 16
# Allowed rounding error of a logit relative to the largest one: eager and compiled kernels sum in different orders.
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}


@dataclass(frozen=True)
class PromptCheck:
    """``max_difference``: max |Δlogit| over the prompt; ``greedy_agreement``: share of equal greedy tokens."""

    prompt: str
    tokens: int
    max_difference: float
    tolerance: float
    greedy_agreement: float
    tie: float | None  # the eager model's logit gap where the greedy tokens first differ

    @property
    def passed(self) -> bool:
        within = self.max_difference <= self.tolerance
        return within and (self.tie is None or self.tie <= 2 * self.tolerance)


def verify_bundle(loaded: LoadedModel, directory: Path, dtype: str) -> list[PromptCheck]:
    """Check every prompt. Raises VerificationError that names the prompts whose difference exceeds rounding."""
    with Engine.load(directory, EngineOptions(policy="full", verify=False)) as engine:
        checks = [_check(loaded, engine, name, ids, dtype) for name, ids in prompts(engine)]
    failed = [c for c in checks if not c.passed]
    if failed:
        lines = "; ".join(
            f"{c.prompt!r}: max |Δlogit| {c.max_difference:.1e} (allowed {c.tolerance:.1e}), "
            f"greedy agreement {c.greedy_agreement:.0%}"
            for c in failed
        )
        raise VerificationError(
            f"the bundle differs from the eager model: {lines}. Nothing was written. Please report the model's config; "
            "--no-verify writes the bundle all the same"
        )
    return checks


def prompts(engine: Engine) -> list[tuple[str, list[int]]]:
    """Text prompts cut to the cache; without a tokenizer, seeded token ids."""
    room = max(1, engine.manifest.max_seq_len - GREEDY_TOKENS)
    if engine.tokenizer is not None:
        encoded = [(text, engine.tokenizer.encode(text)) for text in PROMPTS]
        return [(text.splitlines()[0], ids[:room]) for text, ids in encoded if ids]
    rng = np.random.default_rng(0)
    vocab = engine.manifest.model.vocab_size
    return [(f"{n} random ids", rng.integers(0, vocab, min(n, room)).tolist()) for n in (1, 7, 24)]


def _check(loaded: LoadedModel, engine: Engine, name: str, ids: list[int], dtype: str) -> PromptCheck:
    expected = _eager_logits(loaded, ids)
    difference = np.abs(prompt_logits(engine, ids) - expected)
    tolerance = TOLERANCE[dtype] * max(1.0, float(np.abs(expected).max()))
    count = min(GREEDY_TOKENS, engine.manifest.max_seq_len - len(ids) + 1)
    ours = engine.generate(ids, GenerationParams(max_new_tokens=count, ignore_eos=True))[0].token_ids
    theirs, gaps = _eager_greedy(loaded, ids, count)
    same = [a == b for a, b in zip(ours, theirs, strict=True)]
    tie = None if all(same) else gaps[same.index(False)]
    worst = float("nan") if np.isnan(difference).any() else float(difference.max())
    return PromptCheck(name, len(ids), worst, tolerance, sum(same) / len(same), tie)


def prompt_logits(engine: Engine, ids: list[int]) -> np.ndarray:
    """The compiled model's logits [S, V] fp32 for every token of a prompt, from an empty cache."""
    step = engine.backend.context(1).step(0, [len(ids)], [len(ids)])
    step.input_ids[:] = ids
    step.place([0])
    for segment in engine.manifest.segments:
        step.run(segment.name)
    return step.logits.astype(np.float32)


def _eager_logits(loaded: LoadedModel, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return loaded.model(input_ids=torch.tensor([ids])).logits[0].float().numpy()


def _eager_greedy(loaded: LoadedModel, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """``count`` greedy tokens by the eager model with its own cache, and the gap between its two largest logits at each."""
    tokens: list[int] = []
    gaps: list[float] = []
    feed, cache = torch.tensor([ids]), None
    with torch.no_grad():
        for _ in range(count):
            output = loaded.model(input_ids=feed, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            first, second = output.logits[0, -1].float().topk(2).values.tolist()
            tokens.append(int(output.logits[0, -1].argmax()))
            gaps.append(first - second)
            feed = torch.tensor([[tokens[-1]]])
    return tokens, gaps
