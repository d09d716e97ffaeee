"""The boundaries between a model's decoder layers, counted in calls: what a pass has been through when it stands at one.

A looped model calls its L layers several times over; boundary n is the residual stream after n calls. The end of a loop lies
behind its last layer, in front of the final norm, as the end of the model does, so that the head reads both alike.

Layers with hyper-connections (Xie et al. 2026) pass on n residual streams [B, S, n, D]: the hidden state of a token is then all
of them, and H = n · D.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from tide_runtime.errors import UnsupportedModelError
from torch import nn
from transformers import PreTrainedModel

Visit = Callable[[int, torch.Tensor], torch.Tensor | None]


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's decoder blocks: the one ModuleList as long as ``num_hidden_layers``; the decoder's own if there is another one
    elsewhere, as in an encoder of images."""
    count = model.config.get_text_config().num_hidden_layers
    found = _lists(model, count)
    if len(found) > 1:
        decoder = model.get_decoder()
        found = [one for one in _lists(decoder, count) if any(child is one for child in decoder.children())]
    if len(found) != 1:
        names = [name for name, module in model.named_modules() if any(module is one for one in found)]
        raise UnsupportedModelError(
            f"{type(model).__name__} is not supported, because {' and '.join(names) or 'no list of modules'} may be its "
            f"{count} decoder layers; TIDE compiles decoders that are one stack of layers"
        )
    return found[0]


def _lists(model: nn.Module, count: int) -> list[nn.ModuleList]:
    """Lists of ``count`` modules, the outermost ones."""
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    return [m for m in found if not any(m is not o and m in o.modules() for o in found)]


def decoder_stack(model: PreTrainedModel) -> nn.Module:
    """The module that contains the decoder layers, from embeddings to final norm."""
    layers = decoder_layers(model)
    return next(module for module in model.modules() if any(child is layers for child in module.children()))


class _Calls(threading.local):
    """Layers called so far in the pass that a thread runs."""

    count = 0


@contextmanager
def at_boundaries(model: PreTrainedModel, visit: Visit, begin_loop: Visit = lambda number, hidden: None) -> Iterator[None]:
    """Context in which each pass calls ``visit(n, hidden [B, S, H])`` at every boundary, 0 … L · loops, and ``begin_loop`` with
    the number of the boundary before and what the first layer of a later loop reads; a tensor that it returns goes on in place of
    the hidden state.

    A pass raises UnsupportedModelError where the layers do not run as whole loops, in their order.
    """
    layers = decoder_layers(model)
    calls = _Calls()

    def begin(*_: object) -> None:
        calls.count = 0

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = calls.count
        if layers[number % len(layers)] is not module:
            raise UnsupportedModelError(
                f"{type(model).__name__} is not supported, because its layers do not run one after the other, the whole stack at "
                "a time; TIDE compiles decoders that run their layers in order, once or in loops"
            )
        calls.count += 1
        begins = number and not number % len(layers)  # its boundary was visited when the loop before it ended
        visited = _visited(begin_loop if begins else visit, number, args[0] if args else kwargs["hidden_states"])
        if visited is None:
            return None
        return ((visited, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": visited})

    def after(_module: nn.Module, _args: object, output: Any) -> Any:
        visited = _visited(visit, calls.count, output[0] if isinstance(output, tuple) else output)
        return (visited, *output[1:]) if visited is not None and isinstance(output, tuple) else visited

    with ExitStack() as hooks:
        hooks.callback(decoder_stack(model).register_forward_pre_hook(begin).remove)
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
        hooks.callback(layers[-1].register_forward_hook(after).remove)
        yield


def _visited(visit: Visit, number: int, hidden: torch.Tensor) -> torch.Tensor | None:
    """What ``visit`` gives for a hidden state, in the shape of that state."""
    if hidden.ndim == 3:
        return visit(number, hidden)
    visited = visit(number, hidden.flatten(2))
    return None if visited is None else visited.unflatten(2, hidden.shape[2:])
