"""What all answers of one request have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import time
from uuid import uuid4

from tide_serve.service import Service

# A generation that its request's time limit ended has been cut off, as by max_tokens; OpenAI has no word of its own for it.
_FINISH = {"eos": "stop", "stop": "stop", "length": "length", "cache_full": "length", "deadline": "length", "cancelled": "length"}


@dataclass(frozen=True)
class AnswerHead:
    """Identity of an answer, the same in all events of a stream.

    Args:
        model: the name that the request gave.
        system_fingerprint: changes with what may change a text of the same seed.
    """

    id: str
    model: str
    system_fingerprint: str
    created: int = field(default_factory=lambda: int(time()))


def answer_head(service: Service, prefix: str, model: str) -> AnswerHead:
    """A new answer's head, with an id that begins with ``prefix``."""
    return AnswerHead(f"{prefix}-{uuid4().hex}", model, service.fingerprint)


def finish_reason(reason: str) -> str:
    """OpenAI's word for the engine's ``reason``."""
    return _FINISH[reason]
