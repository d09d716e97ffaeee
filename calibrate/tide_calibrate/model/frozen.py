"""The model under calibration: its weights never change, and the parts of it that exit heads run are built once."""

from __future__ import annotations

import copy
from functools import cached_property

from tide_runtime.errors import ParamsError
from torch import nn
from transformers import PreTrainedModel

from tide_calibrate.model.lm_head import LMHead
from tide_calibrate.model.tail import ModelTail
from tide_export.trace import decoder_layers


class FrozenModel:
    """``model`` in eval mode with gradients to its weights turned off for good; L layers, hidden size H."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval().requires_grad_(False)
        self.num_layers = len(decoder_layers(model))
        self.hidden_size: int = model.config.get_text_config().hidden_size
        self._tails: dict[int, ModelTail] = {}

    @cached_property
    def lm_head(self) -> LMHead:
        """Final norm and LM head. Raises UnsupportedModelError when the model cannot be cut there."""
        return LMHead(self.model)

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a sliding-window layer sees at most; None when the model has none."""
        return getattr(self.model.config.get_text_config(), "sliding_window", None)

    def tail(self, layers: int) -> ModelTail:
        """The last ``layers`` layers with norm and LM head, shared by all who ask."""
        if layers not in self._tails:
            self._tails[layers] = ModelTail(self.model, self._start(layers))
        return self._tails[layers]

    def copied_tail(self, layers: int) -> ModelTail:
        """The same with a copy of those layers that may be trained; norm and LM head stay the model's."""
        start = self._start(layers)
        copies = nn.ModuleList(copy.deepcopy(layer) for layer in decoder_layers(self.model)[start:])
        return ModelTail(self.model, start, list(copies.requires_grad_(True)))

    def _start(self, layers: int) -> int:
        if not 1 <= layers < self.num_layers:
            raise ParamsError(f"a tail has 1 … {self.num_layers - 1} of the model's {self.num_layers} layers, got {layers}")
        return self.num_layers - layers
