"""Run an unmodified transformers model with the parameters of one layer in memory at a time.

A model that was built without storage computes nothing by itself: its parameters are fake, or on the device ``meta``. Inside
`layer_by_layer` each of its modules gets them from a `ParameterSource` before it runs, and loses them afterwards. All tokens go
through a layer together, so a pass reads each weight once. The model's own code does the rest: rotary embeddings, masks, caches.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.errors import VerificationError
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from tide_export.model.boundaries import at_boundaries, decoder_layers
from tide_export.quantize.quantizers import token_tables
from tide_export.sources.parameters import ParameterSource

_HEAD_BYTES = 1 << 26  # bytes of the head's rows that are in memory at a time

Seen = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class EagerPass:
    """What a model computes for texts whose T tokens are packed one text after the other.

    Args:
        states: layers run before a cut → residual stream [T, H] there, in fp32; before the final norm where that is all layers.
        logits: [T, V] in fp32.
    """

    states: dict[int, NDArray[np.float32]]
    logits: NDArray[np.float32]


def eager_pass(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], cuts: Sequence[int], cache: Cache | None = None, first: int = 0
) -> EagerPass:
    """Run ``texts``, which begin at position ``first``, from an empty ``cache``, in one pass. A model without storage runs inside
    `layer_by_layer`.

    Shorter texts are padded on the right: no token attends to what comes after it. Raises VerificationError where parameters are
    read that no module filled.
    """
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    valid = torch.arange(longest) < torch.tensor([[len(text)] for text in texts])
    states: dict[int, NDArray[np.float32]] = {}

    def keep(boundary: int, hidden: Tensor) -> None:
        if boundary in cuts:
            states[boundary] = _values(hidden, valid)

    options = {"past_key_values": cache} if cache is not None else {}
    if first:
        options["position_ids"] = first + torch.arange(longest)[None]

    rows = valid

    def drop_padding(head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal rows
        rows = torch.ones(1, int(valid.sum()), dtype=torch.bool)
        return (inputs[0][valid][None], *inputs[1:])  # logits of a large vocabulary are hundreds of MB

    with at_boundaries(model, keep), torch.no_grad(), ExitStack() as stack:
        if (head := model.get_output_embeddings()) is not None:
            stack.callback(head.register_forward_pre_hook(drop_padding).remove)
        logits = model(input_ids=ids, use_cache=cache is not None, **options).logits
    return EagerPass(states, _values(logits, rows))


def last_logits_step_by_step(model: PreTrainedModel, ids: Sequence[int], count: int) -> NDArray[np.float32]:
    """Logits [count, V] of the last ``count`` tokens of a text, each of which runs by itself with the model's own cache."""
    rows: list[Tensor] = []
    kept: dict[str, Any] = {}
    numbered = "position_ids" in inspect.signature(model.forward).parameters
    ends = [0, *range(len(ids) - count, len(ids) + 1)]
    with torch.no_grad():
        for first, end in itertools.pairwise(ends):
            if numbered:  # some models count from the cache of their first layer, which may have no keys
                kept["position_ids"] = torch.arange(first, end)[None]
            output = model(input_ids=torch.tensor([ids[first:end]]), use_cache=True, **kept)
            kept = {name: output[name] for name in ("past_key_values", "cache_params") if output.get(name) is not None}
            rows.append(output.logits[:, -1])
    return _values(torch.stack(rows[1:], 1), torch.ones(1, count, dtype=torch.bool))


def _values(tensor: Tensor, valid: Tensor) -> NDArray[np.float32]:
    if isinstance(tensor, FakeTensor):
        raise VerificationError(
            "the model cannot be run layer by layer, because a part of it reads parameters of another part; --no-verify writes "
            "the bundle without a comparison"
        )
    return tensor[valid].float().numpy()


@contextmanager
def layer_by_layer(model: PreTrainedModel, source: ParameterSource, seen: Seen | None = None) -> Iterator[None]:
    """Context in which ``model`` runs although its parameters have no storage; one whose parameters have runs as it is.

    A decoder layer has all its parameters while it runs, another module its own. An embedding of tokens gets the rows of those
    that run, the head some rows at a time.

    Args:
        seen: called with each parameter but embedding and head when it has been read.
    """
    layers = set(decoder_layers(model))
    inside = {module for layer in layers for module in layer.modules()} - layers
    tables = token_tables(model)
    head = model.get_output_embeddings()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            places = [] if module in inside else _without_storage(module, name, recurse=module in layers)
            if not places:
                continue
            if module in tables:
                stack.enter_context(_replaced_forward(module, _look_up(module, places[0], source)))
            elif module is head and isinstance(module, nn.Linear):
                stack.enter_context(_replaced_forward(module, _head_in_parts(module, places, source)))
            else:
                stack.enter_context(_filled_while_running(module, places, source, seen))
        yield


@dataclass(frozen=True)
class _Place:
    """The parameter ``key`` of the module ``owner``; ``name``: in the model."""

    owner: nn.Module
    key: str
    name: str

    @contextmanager
    def holding(self, value: Tensor) -> Iterator[None]:
        placeholder = self.owner._parameters[self.key]
        self.owner._parameters[self.key] = nn.Parameter(value, requires_grad=False)
        try:
            yield
        finally:
            self.owner._parameters[self.key] = placeholder


def _without_storage(module: nn.Module, prefix: str, recurse: bool) -> list[_Place]:
    return [
        _Place(owner, key, ".".join(filter(None, (prefix, inner, key))))
        for inner, owner in (module.named_modules() if recurse else [("", module)])
        for key, parameter in owner._parameters.items()
        if parameter is not None and (parameter.is_meta or isinstance(parameter, FakeTensor))
    ]


@contextmanager
def _filled_while_running(
    module: nn.Module, places: Sequence[_Place], source: ParameterSource, seen: Seen | None
) -> Iterator[None]:
    held = ExitStack()

    def fill(*_: object) -> None:
        for place in places:
            value = source.value(place.name)
            if seen is not None:
                seen(place.name, value)
            held.enter_context(place.holding(value))

    def drop(*_: object) -> None:
        held.close()

    with ExitStack() as stack:
        stack.callback(module.register_forward_pre_hook(fill).remove)
        stack.callback(module.register_forward_hook(drop, always_call=True).remove)
        yield


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _look_up(embedding: nn.Module, place: _Place, source: ParameterSource) -> Callable[..., Tensor]:
    """The module's own forward on a table of the rows that are looked up, under new ids."""
    forward = embedding.forward

    def look_up(ids: Tensor, *args: object, **kwargs: object) -> Tensor:
        wanted, compact = ids.unique(return_inverse=True)
        table = torch.cat([source.rows(place.name, int(row), 1) for row in wanted])
        padding, embedding.padding_idx = embedding.padding_idx, None  # an id of the whole table
        try:
            with place.holding(table):
                return forward(compact, *args, **kwargs)
        finally:
            embedding.padding_idx = padding

    return look_up


def _head_in_parts(head: nn.Linear, places: Sequence[_Place], source: ParameterSource) -> Callable[[Tensor], Tensor]:
    """The module's own forward on some rows of weight and bias after the other."""
    forward = head.forward
    rows, columns = head.weight.shape
    most = max(1, _HEAD_BYTES // (columns * head.weight.element_size()))

    def in_parts(states: Tensor) -> Tensor:
        logits = states.new_empty(*states.shape[:-1], rows)
        for first in range(0, rows, most):
            with ExitStack() as held:
                for place in places:
                    held.enter_context(place.holding(source.rows(place.name, first, min(most, rows - first))))
                logits[..., first : first + most] = forward(states)
        return logits

    return in_parts
