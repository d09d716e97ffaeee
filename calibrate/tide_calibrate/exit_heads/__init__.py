"""Exit heads map the state after a checkpoint to logits; ``make_head`` constructs any of them."""

from __future__ import annotations

from collections.abc import Callable

from tide_runtime.errors import ParamsError

from tide_calibrate.exit_heads.base import MAX_RANK, ExitHead, IdentityHead, LinearHead, Translator
from tide_calibrate.exit_heads.tail import TailHead
from tide_calibrate.model.frozen import FrozenModel

_Maker = Callable[[FrozenModel, int, int, Translator], ExitHead]  # model, checkpoint, k, untrained translator

_MAKERS: dict[str, _Maker] = {
    "identity": lambda model, checkpoint, _, __: IdentityHead(model, checkpoint),
    "linear": lambda model, checkpoint, _, translator: LinearHead(model, checkpoint, translator),
    "tail": TailHead,
}


def make_head(kind: str, model: FrozenModel, checkpoint: int, rank: int = MAX_RANK, seed: int = 0) -> ExitHead:
    """Construct an untrained head; its translator starts as the identity.

    Args:
        kind: ``identity``, ``linear``, or ``tail:k`` with k layers, 1 … L - 1.
        checkpoint: layers run before the exit, 1 … L - 1.
        rank: rank of the translator.

    Raises:
        ParamsError: an argument is unknown or out of range.
        UnsupportedModelError: the model cannot be cut where the head needs it.
    """
    name, layers = parse_kind(kind)
    if not 1 <= checkpoint < model.num_layers:
        raise ParamsError(f"a checkpoint of this model lies in 1 … {model.num_layers - 1}, got {checkpoint}")
    if layers >= model.num_layers:
        raise ParamsError(f"head {kind} needs more than {layers} layers, the model has {model.num_layers}")
    return _MAKERS[name](model, checkpoint, layers, Translator(model.hidden_size, rank, seed).to(model.device))


def parse_kind(kind: str) -> tuple[str, int]:
    """Parse ``tail:2`` to ("tail", 2) and ``linear`` to ("linear", 0). Raises ParamsError for any other form."""
    name, colon, count = kind.partition(":")
    takes_count = name == "tail"
    if name not in _MAKERS or bool(colon) != takes_count or (takes_count and not (count.isdecimal() and int(count) > 0)):
        raise ParamsError(f"unknown exit head {kind!r}; known are identity, linear and tail:k with k layers (1, 2, …)")
    return name, int(count) if takes_count else 0


__all__ = ["ExitHead", "Translator", "make_head", "parse_kind"]
