"""Exit heads map the state after a checkpoint to logits; ``make_head`` constructs any of them."""

from __future__ import annotations

from tide_runtime.errors import ParamsError
from tide_runtime.plugins import HEADS, extension

from tide_calibrate.exit_heads.base import ExitHead, LensHead
from tide_calibrate.exit_heads.tail import TailHead
from tide_calibrate.kinds import OWN_HEADS, parse_kind
from tide_calibrate.model.frozen import FrozenModel
from tide_export.graphs.exit_modules import MAX_RANK, Translator


def make_head(kind: str, model: FrozenModel, checkpoint: int, rank: int = MAX_RANK, seed: int = 0) -> ExitHead:
    """Construct an untrained head; its translator starts as the identity.

    Args:
        kind: ``identity``, ``linear``, ``tail:k`` with k layers, 1 … L - 1, or a head of a package.
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
    if name == "identity":
        return LensHead(kind, model, checkpoint, None)
    hidden = model.hidden_size
    made = Translator(hidden, rank, seed) if name in OWN_HEADS else extension(HEADS, name)(hidden, seed=seed)
    translator = made.to(model.device)
    return TailHead(model, checkpoint, layers, translator) if layers else LensHead(kind, model, checkpoint, translator)


__all__ = ["ExitHead", "Translator", "make_head", "parse_kind"]
