"""The end of a model: its own code from one layer boundary on, fed with states from outside.

The layers before the boundary are replaced, in a shallow copy of the model, by stand-ins that do nothing; the last stand-in
hands over the given state instead of what it got. So final norm, soft-caps, logit scaling and everything else that a model
does around its layers stay the model's own, and no architecture needs an adapter.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch
from tide_runtime.errors import ParamsError, UnsupportedModelError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from tide_export.trace import decoder_layers

_CHECK_TOKENS = 6
_RELATIVE_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
_HALF_TOLERANCE = 5e-2


class _StandIn(nn.Module):
    """Takes a layer's place without running it; everything a model asks of the layer itself is answered by the layer."""

    def __init__(self, layer: nn.Module, returns_tuple: bool) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer  # not registered: its weights are not part of the tail
        self.returns_tuple = returns_tuple
        self.handed_over = threading.local()  # .state: exits that share a tail are trained in several threads

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor]:
        state = getattr(self.handed_over, "state", hidden_states)
        return (state,) if self.returns_tuple else state


class ModelTail(nn.Module):
    """The layers from boundary ``start`` (layers already run, 1 … L) to the logits; ``start`` = L is final norm and LM head.

    Args:
        model: in eval mode; shared, not copied.
        start: layers that are skipped.
        layers: run these in place of the model's own last L - start layers.

    Raises:
        ParamsError: ``start`` is out of range.
        UnsupportedModelError: the model's own logits are not reproduced from its own state at ``start``.
    """

    def __init__(self, model: PreTrainedModel, start: int, layers: Sequence[nn.Module] | None = None) -> None:
        super().__init__()
        own = decoder_layers(model)
        if not 1 <= start <= len(own):
            raise ParamsError(f"a tail starts after 1 … {len(own)} layers, got {start}")
        self.start, self.num_layers = start, len(own)
        state, logits, returns_tuple = _observe(model, own[start - 1])
        stand_ins = [_StandIn(layer, returns_tuple) for layer in own[:start]]
        self._last_stand_in = [stand_ins[-1]]  # in a list, so that it is not registered a second time
        self.layers = list(layers or own[start:])
        self.model = _with_module(model, own, nn.ModuleList([*stand_ins, *self.layers]))
        _check(model, self, state, logits)

    def forward(
        self, states: Tensor, positions: Tensor | None = None, mask: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Logits [B, S, V] of ``states`` [B, S, H], both float32 whatever the model computes in.

        Args:
            positions: [B, S] int64; 0 … S-1 when None.
            mask: [B or 1, 1, S, S_past + S], added to the attention scores; causal when None.
            cache: keys and values that the tail's layers also see; theirs are appended.
        """
        return self._run(self.model, states, positions, mask, cache).logits.float()

    def fill(self, cache: Cache, states: Tensor) -> None:
        """Append the keys and values of ``states`` [B, S, H] (causal) to ``cache``; no LM head is run."""
        self._run(self.model.base_model, states, None, None, cache)

    def _run(self, module: nn.Module, states: Tensor, positions: Tensor | None, mask: Tensor | None, cache: Cache | None) -> Any:
        batch, seq, _ = states.shape
        if positions is None:
            positions = torch.arange(seq, device=states.device).expand(batch, seq)
        ids = torch.zeros((batch, seq), dtype=torch.long, device=states.device)  # any: their embeddings are thrown away
        handed_over = self._last_stand_in[0].handed_over
        handed_over.state = states.to(self.model.dtype)
        try:
            return module(
                input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=cache is not None
            )
        finally:
            del handed_over.state


def _with_module(module: nn.Module, old: nn.Module, new: nn.Module) -> Any:
    """A copy of ``module`` in which ``old``, somewhere below, is ``new``; everything beside the path there is shared."""
    if module is old:
        return new
    clone = copy.copy(module)
    clone._modules = {
        name: _with_module(child, old, new) if child is not None and any(m is old for m in child.modules()) else child
        for name, child in module._modules.items()
    }
    return clone


@torch.no_grad()
def _observe(model: PreTrainedModel, layer: nn.Module) -> tuple[Tensor, Tensor, bool]:
    """The model on a few tokens: the state [1, S, H] that ``layer`` hands on, the logits, and whether it does so in a tuple."""
    seen: list[Any] = []
    hook = layer.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    ids = torch.arange(_CHECK_TOKENS, device=model.device)[None] % model.config.get_text_config().vocab_size
    try:
        logits = model(input_ids=ids, use_cache=False).logits.float()
    finally:
        hook.remove()
    returns_tuple = isinstance(seen[0], tuple)
    return (seen[0][0] if returns_tuple else seen[0]).float(), logits, returns_tuple


@torch.no_grad()
def _check(model: PreTrainedModel, tail: ModelTail, state: Tensor, logits: Tensor) -> None:
    name = f"{type(model).__name__} cannot be run from boundary {tail.start} of {tail.num_layers} on"
    try:
        difference = (tail(state) - logits).abs().max()
    except (TypeError, AttributeError, IndexError, KeyError, RuntimeError, ValueError) as error:
        raise UnsupportedModelError(f"{name}: {type(error).__name__}: {error}") from error
    allowed = _RELATIVE_TOLERANCE.get(model.dtype, _HALF_TOLERANCE) * float(logits.abs().max().clamp(min=1.0))
    if not float(difference) <= allowed:
        raise UnsupportedModelError(
            f"{name}: its logits come out different by {float(difference):.3g} (allowed {allowed:.3g}), "
            "so something besides the hidden state passes between its layers"
        )
