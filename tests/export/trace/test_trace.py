"""Code that torch cannot export is refused with the root cause, not with the exporter's full output."""

import pytest
import torch
from export.architectures import tiny_model
from tide_runtime.errors import UnsupportedModelError
from transformers.models.llama.modeling_llama import LlamaMLP

from tide_export.trace.trace_model import trace


def test_code_that_cannot_be_exported_is_refused(monkeypatch):
    """The user would see a raw torch export error, which is not a TideError: the command would print a traceback."""
    own = LlamaMLP.forward

    def forward(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        return own(self, x) if x.sum() > 0 else own(self, x) + 1

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(UnsupportedModelError, match=r"not supported, because torch .* cannot export") as caught:
        trace(tiny_model("llama"))
    assert "This is step 1/3" not in str(caught.value)
