"""The model under calibration, with frozen weights and a cache of the submodels that exit heads share."""

from __future__ import annotations

from functools import cached_property

from tide_runtime.errors import ParamsError
from transformers import PreTrainedModel

from tide_calibrate.model.lm_head import LMHead
from tide_calibrate.model.tail import ModelTail
from tide_export.trace import decoder_layers


class FrozenModel:
    """Wrap ``model`` in eval mode with gradients disabled; it has L layers and hidden size H."""

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
        """Size of the sliding attention window in tokens; None for a model without one."""
        return getattr(self.model.config.get_text_config(), "sliding_window", None)

    def tail(self, layers: int) -> ModelTail:
        """The last ``layers`` layers with norm and LM head; built once and shared."""
        if not 1 <= layers < self.num_layers:
            raise ParamsError(f"a tail has 1 … {self.num_layers - 1} of the model's {self.num_layers} layers, got {layers}")
        if layers not in self._tails:
            self._tails[layers] = ModelTail(self.model, self.num_layers - layers)
        return self._tails[layers]
