"""How a capture runs whole windows of text: the interface, and the unmodified PyTorch model with hooks between its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tide_calibrate.capture.writer import BatchWriter
from tide_calibrate.model.frozen import LOGIT_BYTES, sliced_logits
from tide_export.model.boundaries import at_boundaries

OnState = Callable[[int, torch.Tensor], None]


@contextmanager
def hidden_states(model: PreTrainedModel, boundaries: Sequence[int], on_state: OnState) -> Iterator[None]:
    """While active, call ``on_state(c, hidden [B, T, H])`` in every forward pass, for each boundary c: after ``c`` layers.

    The last boundary is before the final norm (transformers' last ``output_hidden_states`` is after the norm).
    """

    def visit(boundary: int, state: torch.Tensor) -> None:
        if boundary in boundaries:
            on_state(boundary, state)

    with at_boundaries(model, visit):
        yield


class ForwardPass(Protocol):
    """Runs a model that it was made with, over boundaries that it was made with."""

    def run(self, tokens: NDArray[np.int32], lengths: NDArray[np.int32], batch: BatchWriter) -> None:
        """Write states and logits of the windows ``tokens`` [B, T], of which window b has ``lengths[b]`` valid tokens.

        Logits are written in slices of positions, so that [B, T, V] of them never exist at once.
        """


class EagerPass:
    """The unmodified PyTorch model.

    Args:
        boundaries: layers run before each state that is captured, 0 … L.
        logit_bytes: size of the fp32 logits that are held at once.
    """

    def __init__(self, model: PreTrainedModel, boundaries: Sequence[int], logit_bytes: int = LOGIT_BYTES) -> None:
        self._model = model.eval()
        self._boundaries = boundaries
        self._logit_bytes = logit_bytes

    @torch.inference_mode()
    def run(self, tokens: NDArray[np.int32], lengths: NDArray[np.int32], batch: BatchWriter) -> None:
        ids = torch.from_numpy(tokens).long().to(self._model.device)
        valid = torch.arange(ids.shape[1]) < torch.from_numpy(lengths)[:, None]
        mask = None if bool(valid.all()) else valid.long().to(ids.device)  # without a mask, attention uses its faster causal path
        with hidden_states(self._model, self._boundaries, batch.write_hidden):
            for start, logits in sliced_logits(self._model, ids, mask, self._logit_bytes):
                batch.write_logits(start, logits)
