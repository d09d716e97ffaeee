"""Exit head that translates the state to the input of the model's last k layers and runs those, skipping the layers between.

At run time a draft's tail attends over the keys and values of the *true* states at all earlier positions, because every accepted
token has run all layers by then; only the draft's own key and value come from its translated state. Training reproduces this:
in a window of T tokens, query p of the tail sees the true keys at positions < p and the translated key at p, [T, 2T] scores.
"""

from __future__ import annotations

from collections.abc import Mapping

from tide_runtime.errors import ParamsError
from torch import Tensor

from tide_calibrate.exit_heads.base import ExitHead
from tide_calibrate.exit_heads.translator import Translator
from tide_calibrate.exit_heads.true_cache import draft_mask, true_cache
from tide_calibrate.model.frozen import FrozenModel


class TailHead(ExitHead):
    """Translator, then the frozen model's last ``layers`` layers, final norm and LM head."""

    def __init__(self, model: FrozenModel, checkpoint: int, layers: int, translator: Translator) -> None:
        self.start = model.num_layers - layers
        if checkpoint > self.start:
            raise ParamsError(
                f"head tail:{layers} at checkpoint {checkpoint} of {model.num_layers} layers would run layers twice; "
                f"it needs a checkpoint of at most {self.start}"
            )
        super().__init__(f"tail:{layers}", checkpoint, (checkpoint, self.start), translator)
        self.tail, self.window = model.tail(layers), model.sliding_window

    def logits(self, states: Mapping[int, Tensor], vocabulary: Tensor | None = None) -> Tensor:
        drafts = self.translated(states)
        self._check_window_length(drafts.shape[1])
        cache = true_cache(self.tail, states[self.start])
        mask = draft_mask(drafts.shape[1], self.tail.model.dtype)
        return self.tail(drafts, mask=mask, cache=cache, vocabulary=vocabulary)

    def _check_window_length(self, tokens: int) -> None:
        if self.window is not None and tokens > self.window:
            raise ParamsError(
                f"windows of {tokens} tokens are longer than the model's sliding attention window of {self.window}; "
                f"head {self.kind} needs a capture with windows of at most {self.window} tokens"
            )
