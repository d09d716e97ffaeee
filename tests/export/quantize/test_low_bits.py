"""Low-bit weights of every architecture, with the biases that its config can switch on."""

from pathlib import Path

import pytest
from export.architectures import ARCHITECTURES, MAX_POSITIONS, random_model
from slow_cases import slow_but
from transformers import PreTrainedConfig, PreTrainedModel

from tide_export.config import ExportConfig
from tide_export.export import quantize_loaded, write_bundle
from tide_export.passes.quantize_experts import DOWN
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel

QUIET = ExportProgress(quiet=True)
LAYERS = 1  # products are the same in all layers


def _biased(config: PreTrainedConfig) -> PreTrainedConfig:
    """``config`` with one layer, and every bias that it has a setting for."""
    for name, value in config.to_dict().items():
        if isinstance(value, bool) and "bias" in name:
            setattr(config, name, True)
    config.num_hidden_layers = LAYERS
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:LAYERS]
    return config


def _model(name: str) -> PreTrainedModel:
    model = random_model(_biased(ARCHITECTURES[name]()))
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            parameter.data.normal_(0.0, 0.5)  # the default is 0, where a bias that is left out changes nothing
    return model


@pytest.mark.parametrize("weights", ["int8", "int4", "w8a8"])
@pytest.mark.parametrize("name", slow_but(ARCHITECTURES, "llama", "gpt2", "gpt_oss"))
def test_every_architecture_with_biases(name: str, weights: str, tmp_path: Path) -> None:
    """An export in few bits would end in a traceback, lose a bias, or keep a matrix in fp32: the export itself compares with the
    rounded model."""
    head = "8" if weights == "int4" else "auto"
    config = ExportConfig(weights=weights, max_seq_len=MAX_POSITIONS // 2, targets=("cpu",), checkpoints="none", head_bits=head)
    loaded = quantize_loaded(LoadedModel(_model(name), None, name), weights, config.quantizer, QUIET, head_bits=head)
    manifest, checks = write_bundle(loaded, tmp_path, config, QUIET)
    experts = sum(parameter.endswith(DOWN) for parameter in loaded.quantized)  # one operator has both of their matrices
    assert manifest.targets["cpu"].passes["quantize_weights"] == len(loaded.quantized) - experts
    assert all(check.passed for check in checks)
