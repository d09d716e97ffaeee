"""Run a model from a layer boundary on, with given hidden states as input.

In a shallow copy of the model, the layers before the boundary are replaced by stand-ins that return their input; the last
stand-in returns the given state instead. Final norm, soft-caps, logit scaling and everything else around the layers remain the
model's own code, so no architecture needs an adapter. In a looped model a stand-in does so in the loops before the boundary, and
runs its layer in the others.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from tide_runtime.errors import ParamsError, UnsupportedModelError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from tide_export.model.boundaries import decoder_layers

_CHECK_TOKENS = 6
_RELATIVE_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
_HALF_TOLERANCE = 5e-2


class VocabularyRows(nn.Module):
    """Stands in for the output embedding ``linear``: all of its rows, or those that the calling thread has chosen.

    Heads that share a model are trained in several threads, so the choice is thread-local.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self._thread_rows = threading.local()  # .ids

    @property
    def weight(self) -> Tensor:
        """[V, H]; some models read its dtype."""
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias

    @contextmanager
    def only(self, ids: Tensor | None) -> Iterator[None]:
        """Within the context, compute logits of the tokens ``ids`` [n] alone, in their order; None: of all."""
        self._thread_rows.ids = ids
        try:
            yield
        finally:
            self._thread_rows.ids = None

    def forward(self, states: Tensor) -> Tensor:
        ids: Tensor | None = getattr(self._thread_rows, "ids", None)
        if ids is None:
            return self.linear(states)
        return F.linear(states, self.weight[ids], None if self.bias is None else self.bias[ids])


class _Pass(threading.local):
    """The pass of a tail that a thread runs; heads that share one are trained in several threads.

    Attributes:
        state: given at the boundary.
        calls: layers called so far.
    """

    state: Tensor
    calls = 0


class _StandIn(nn.Module):
    """Replaces a layer in its calls before the boundary; attributes that the model reads from the layer are forwarded to it.

    Args:
        start: layers that the pass skips; the last of them returns the pass's state.
    """

    def __init__(self, layer: nn.Module, returns_tuple: bool, start: int, running: _Pass) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer  # not registered: the stand-in has no weights of its own
        self.returns_tuple = returns_tuple
        self.start = start
        self.running = running

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor]:
        number = self.running.calls
        self.running.calls += 1
        if number >= self.start:
            return self.__dict__["_layer"](hidden_states, *args, **kwargs)
        state = self.running.state if number == self.start - 1 else hidden_states
        return (state,) if self.returns_tuple else state


class ModelTail(nn.Module):
    """The layers from boundary ``start`` (layers already run, 1 … L) to the logits; ``start`` = L is final norm and LM head. The
    layers of a looped model count in each loop.

    Args:
        model: in eval mode; shared, not copied.
        start: layers that are skipped.

    Raises:
        ParamsError: ``start`` is out of range.
        UnsupportedModelError: the model's own logits are not reproduced from its own state at ``start``.
    """

    def __init__(self, model: PreTrainedModel, start: int) -> None:
        super().__init__()
        layers = decoder_layers(model)
        states, logits, returns_tuple = _observe(model)
        self.start = start
        self.num_layers = len(states)
        if not 1 <= start <= self.num_layers:
            raise ParamsError(f"a tail starts after 1 … {self.num_layers} layers, got {start}")
        self._running = _Pass()
        self._layers = list(layers)  # in a list, so that torch does not register them a second time
        stand_ins = [_StandIn(layer, returns_tuple, start, self._running) for layer in layers]
        self.model = _with_module(model, layers, nn.ModuleList(stand_ins))
        self._rows: VocabularyRows | None = None
        if isinstance(output := model.get_output_embeddings(), nn.Linear):
            self._rows = VocabularyRows(output)
            self.model = _with_module(self.model, output, self._rows)
        _check_logits(model, self, states[start - 1], logits)
        self.samples_vocabulary = self._rows is not None and _samples_vocabulary(self, states[start - 1], logits)

    def forward(
        self,
        states: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        vocabulary: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, S, V] of ``states`` [B, S, H], both float32 for any model dtype.

        Args:
            positions: [B, S] int64; 0 … S-1 when None.
            mask: [B or 1, 1, S, S_past + S], added to the attention scores; causal when None.
            cache: past keys and values of the tail's layers; new ones are appended.
            vocabulary: [n] token ids; the logits are then [B, S, n], of these alone. Only where ``samples_vocabulary``.
        """
        with nullcontext() if self._rows is None else self._rows.only(vocabulary):
            return self._run(self.model, states, positions, mask, cache).logits.float()

    def final_states(self, states: Tensor) -> Tensor:
        """States [B, S, H] after the last layer, before the final norm, of ``states`` [B, S, H]; for ``start`` below L."""
        outputs = _outputs_of(self._layers[-1:], lambda: self._run(self.model.base_model, states, None, None, None))
        return outputs[-1][0]

    def fill(self, cache: Cache, states: Tensor) -> None:
        """Append the keys and values of ``states`` [B, S, H] (causal) to ``cache``, without running the LM head."""
        self._run(self.model.base_model, states, None, None, cache)

    def _run(self, module: nn.Module, states: Tensor, positions: Tensor | None, mask: Tensor | None, cache: Cache | None) -> Any:
        batch, seq, _ = states.shape
        if positions is None:
            positions = torch.arange(seq, device=states.device).expand(batch, seq)
        ids = torch.zeros((batch, seq), dtype=torch.long, device=states.device)  # dummies: their embeddings are discarded
        self._running.state = states.to(self.model.dtype)
        self._running.calls = 0
        try:
            return module(
                input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=cache is not None
            )
        finally:
            del self._running.state


def _with_module(module: nn.Module, old: nn.Module, new: nn.Module) -> Any:
    """A copy of ``module`` with its descendant ``old`` replaced by ``new``; modules off the path to it are shared."""
    if module is old:
        return new
    clone = copy.copy(module)
    clone._modules = {
        name: _with_module(child, old, new) if child is not None and any(m is old for m in child.modules()) else child
        for name, child in module._modules.items()
    }
    return clone


@torch.no_grad()
def _observe(model: PreTrainedModel) -> tuple[list[Tensor], Tensor, bool]:
    """Run the model on a few tokens.

    Returns:
        The output state [1, S, H] of each call of a layer, the logits, and whether layers return a tuple.
    """
    ids = torch.arange(_CHECK_TOKENS, device=model.device)[None] % model.config.get_text_config().vocab_size
    logits: list[Tensor] = []
    run = lambda: logits.append(model(input_ids=ids, use_cache=False).logits.float())  # noqa: E731
    outputs = _outputs_of(decoder_layers(model), run)
    return [state.float() for state, _ in outputs], logits[0], outputs[0][1]


def _outputs_of(layers: Iterable[nn.Module], run: Callable[[], object]) -> list[tuple[Tensor, bool]]:
    """What each call of ``layers`` returns while ``run`` runs the model, and whether it returns it in a tuple.

    Calls of other threads, whose heads share the layers, do not count.
    """
    outputs = list[tuple[Tensor, bool]]()
    own = threading.get_ident()

    def keep(_module: nn.Module, _inputs: object, output: Any) -> None:
        if threading.get_ident() == own:
            outputs.append((output[0], True) if isinstance(output, tuple) else (output, False))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(keep).remove)
        run()
    return outputs


@torch.no_grad()
def _check_logits(model: PreTrainedModel, tail: ModelTail, state: Tensor, logits: Tensor) -> None:
    name = f"{type(model).__name__} cannot be run from boundary {tail.start} of {tail.num_layers} on"
    try:
        differ = _differ_by(tail(state), logits, model.dtype)
    except (TypeError, AttributeError, IndexError, KeyError, RuntimeError, ValueError) as error:
        raise UnsupportedModelError(f"{name}: {type(error).__name__}: {error}") from error
    if differ is not None:
        raise UnsupportedModelError(
            f"{name}: its logits come out different by {differ[0]:.3g} (allowed {differ[1]:.3g}), "
            "so something besides the hidden state passes between its layers"
        )


@torch.no_grad()
def _samples_vocabulary(tail: ModelTail, state: Tensor, logits: Tensor) -> bool:
    """Whether the logits of some tokens alone are those among all; not where code after the LM head expects all of them."""
    ids = torch.arange(1, logits.shape[-1], max(2, logits.shape[-1] // 64), device=logits.device)
    try:
        sampled = tail(state, vocabulary=ids)
    except (IndexError, RuntimeError, ValueError):
        return False
    return sampled.shape[-1] == len(ids) and _differ_by(sampled, logits[..., ids], tail.model.dtype) is None


def _differ_by(computed: Tensor, logits: Tensor, dtype: torch.dtype) -> tuple[float, float] | None:
    """Largest difference and the largest allowed one; None when it is allowed."""
    difference = float((computed - logits).abs().max())
    allowed = _RELATIVE_TOLERANCE.get(dtype, _HALF_TOLERANCE) * float(logits.abs().max().clamp(min=1.0))
    return None if difference <= allowed else (difference, allowed)
