"""The tiny bundle of the runtime's tests, and arms that answer without a model."""

from runtime.conftest import bundle, exits_bundle, hf_model_directory

__all__ = ["bundle", "exits_bundle", "hf_model_directory"]
