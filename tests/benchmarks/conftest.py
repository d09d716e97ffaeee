"""The tiny bundle of the runtime's tests, and engines on it."""

from __future__ import annotations

from runtime.conftest import bundle, exits_bundle, hf_model_directory, load

__all__ = ["bundle", "exits_bundle", "hf_model_directory", "load"]
