"""Fields that all answers have: identity, ``finish_reason``, and ``usage`` with the extension ``depth``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from time import time
from typing import Any, TypeVar
from uuid import uuid4

from tide_runtime import Engine, Generation, RequestStats

from tide_serve.api.service import ServedModel

Key = TypeVar("Key", str, int)
# A generation that its request's time limit ended has been cut off, as by max_tokens; OpenAI has no word of its own for it.
_FINISH = {"eos": "stop", "stop": "stop", "length": "length", "cache_full": "length", "deadline": "length", "cancelled": "length"}


def answer_head(model: ServedModel, prefix: str, kind: str) -> dict[str, Any]:
    """The first fields of a new answer, the same in all events of a stream.

    Args:
        prefix: the answer's id begins with it.
        kind: the answer's ``object``.
    """
    return {
        "id": f"{prefix}-{uuid4().hex}",
        "object": kind,
        "created": int(time()),
        "model": model.name,
        "system_fingerprint": model.fingerprint,
    }


def finish_reason(reason: str) -> str:
    """OpenAI's word for the engine's ``reason``."""
    return _FINISH[reason]


def usage_of(
    engine: Engine, generations: Sequence[Generation], choices: int = 1, prompt_tokens: int | None = None
) -> dict[str, Any]:
    """Usage over all ``generations``, of which each run of ``choices`` shares a prompt; a prompt counts once.

    Args:
        prompt_tokens: their number, where it does not follow from the generations: a prompt that is only echoed has none.

    ``depth``:
        policy: the depth policy that ran.
        num_layers, layers_per_token: decoder layers of the model, and those run for each token after the first, on average.
        drafted, accepted: drafter → tokens that it drafted, and those that the model confirmed.
        depths: layers → output tokens that were final after so many; 0 for drafts from text.
        certificate: under policy ``exit``, {max_disagreement, confidence, covered}; null where there is none.
        uncovered: why the certificate does not cover the answer; empty: it does, or no exit was used.
        same_bits: whether the text is the same whatever other requests ran at the same time (`Engine.bits_limitation`).
    """
    first = generations[::choices]
    tokens = sum(generation.stats.new_tokens for generation in generations)
    prompts = sum(generation.stats.prompt_tokens for generation in first) if prompt_tokens is None else prompt_tokens
    usage: dict[str, Any] = {
        "completion_tokens": tokens,
        "prompt_tokens": prompts,
        "total_tokens": prompts + tokens,
        "prompt_tokens_details": {"cached_tokens": sum(g.stats.prefix_tokens for g in first)},
    }
    if generations:
        usage["depth"] = _depth(engine, [generation.stats for generation in generations])
    return usage


def _depth(engine: Engine, stats: Sequence[RequestStats]) -> dict[str, Any]:
    after_first = [max(0, s.new_tokens - 1) for s in stats]
    layers = sum(s.layers_per_token * count for s, count in zip(stats, after_first, strict=True))
    uncovered = list(dict.fromkeys(reason for s in stats for reason in s.uncovered))
    return {
        "policy": " ".join(dict.fromkeys(s.policy for s in stats)),
        "num_layers": engine.depth,
        "layers_per_token": round(layers / sum(after_first), 3) if any(after_first) else float(engine.depth),
        "drafted": _sums(s.drafted for s in stats),
        "accepted": _sums(s.accepted for s in stats),
        "depths": {str(layers): count for layers, count in sorted(_sums(s.depths(engine.depth) for s in stats).items())},
        "certificate": _certificate(engine, stats, uncovered),
        "uncovered": uncovered,
        "same_bits": engine.bits_limitation is None,
    }


def _sums(counts: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    total: Counter[Key] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _certificate(engine: Engine, stats: Sequence[RequestStats], uncovered: Sequence[str]) -> dict[str, Any] | None:
    calibration = engine.manifest.calibration
    if calibration is None or calibration.certificate is None or not any(s.policy == "exit" for s in stats):
        return None
    certificate = calibration.certificate
    return {
        "max_disagreement": certificate.max_disagreement,
        "confidence": certificate.confidence,
        "covered": not uncovered,
    }
