"""The model under calibration with frozen weights, the submodels that exit heads share, and its logits in slices of positions.

All run the model's own forward, so final norm, soft-cap and logit scaling need no per-architecture code.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from tide_runtime.errors import ParamsError
from torch import Tensor, nn
from transformers import PreTrainedModel

from tide_calibrate.model.tail import ModelTail
from tide_export.model.boundaries import decoder_stack
from tide_export.model.probe import probe_layers

LOGIT_BYTES = 64 << 20  # bytes of one fp32 slice of logits; some models hold three copies of it while they scale and cap


class LMHead(nn.Module):
    """The model's computation after its last layer: final norm, LM head, soft-cap, logit scaling."""

    def __init__(self, model: PreTrainedModel, num_layers: int) -> None:
        super().__init__()
        self.tail = ModelTail(model, num_layers)

    @property
    def device(self) -> torch.device:
        return self.tail.model.device

    @property
    def samples_vocabulary(self) -> bool:
        """Whether the logits of some tokens can be computed without the others."""
        return self.tail.samples_vocabulary

    def forward(self, states: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """Logits [..., V] of residual-stream states [..., H] before the final norm, or of the tokens ``vocabulary`` [n] alone."""
        flat = states.reshape(1, -1, states.shape[-1])
        # No layer runs, so dummy positions and a 1 x 1 mask serve any number of tokens.
        positions = torch.zeros((1, flat.shape[1]), dtype=torch.long, device=flat.device)
        mask = torch.zeros((1, 1, 1, 1), dtype=self.tail.model.dtype, device=flat.device)
        return self.tail(flat, positions, mask, vocabulary=vocabulary).reshape(*states.shape[:-1], -1)


def sliced_logits(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    max_bytes: int = LOGIT_BYTES,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first position, logits [B, n, V] float32) of slices of positions, in order, for ids [B, T].

    The decoder stack runs once. Each further slice runs the model's forward with the stack patched to return that slice of its
    output, so [B, T, V] logits never exist at once.

    Args:
        max_bytes: size of one slice of logits in fp32.
    """
    batch_size, num_positions = input_ids.shape
    step = max(1, max_bytes // (4 * batch_size * model.config.get_text_config().vocab_size))
    stack = decoder_stack(model)
    outputs = []

    def keep_and_slice(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        outputs.append(output)
        return _slice_positions(output, 0, step)

    with stack.register_forward_hook(keep_and_slice):
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, return_dict=True).logits
    yield 0, logits.float()
    for start in range(step, num_positions, step):
        part = _slice_positions(outputs[0], start, start + step)
        with patch.object(stack, "forward", lambda *_, part=part, **__: part):
            logits = model(input_ids=input_ids[:, start : start + step], use_cache=False, return_dict=True).logits
        yield start, logits.float()


def _slice_positions(output: Any, start: int, end: int) -> Any:
    """A model output of the same class, restricted to positions ``start`` … ``end`` - 1."""
    return type(output)(last_hidden_state=output.last_hidden_state[:, start:end])


class FrozenModel:
    """Wrap ``model`` in eval mode with gradients disabled; its tokens run through L layers, and it has hidden size H.

    ``num_layers``: L, counted in every loop; None: a model in host memory is probed.
    """

    def __init__(self, model: PreTrainedModel, num_layers: int | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.num_layers = num_layers or len(probe_layers(model))
        self.hidden_size: int = model.config.get_text_config().hidden_size
        self._tails: dict[int, ModelTail] = {}

    @cached_property
    def lm_head(self) -> LMHead:
        """Final norm and LM head. Raises UnsupportedModelError when the model cannot be cut there."""
        return LMHead(self.model, self.num_layers)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def sliding_window(self) -> int | None:
        """Size of the sliding attention window in tokens; None for a model without one."""
        return getattr(self.model.config.get_text_config(), "sliding_window", None)

    def tail(self, layers: int) -> ModelTail:
        """The last ``layers`` layers with norm and LM head; built once and shared."""
        if not 1 <= layers < self.num_layers:
            raise ParamsError(f"a tail has 1 … {self.num_layers - 1} of the model's {self.num_layers} layers, got {layers}")
        if layers not in self._tails:
            self._tails[layers] = ModelTail(self.model, self.num_layers - layers)
        return self._tails[layers]
