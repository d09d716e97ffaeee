"""The tiny bundle of the runtime's tests."""

from __future__ import annotations

from runtime.conftest import bundle, hf_model_directory

__all__ = ["bundle", "hf_model_directory"]
