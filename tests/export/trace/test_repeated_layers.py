"""Layers that are repeated instead of traced: the same graph for less time, and only where layers are the same."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from export.architectures import ARCHITECTURES
from slow_cases import slow_but
from tide_runtime.bundle.manifest import LayerInfo
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.model.boundaries import decoder_layers
from tide_export.model.probe import probe_layers
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel
from tide_export.trace import trace_model as tracing
from tide_export.trace.repeated_layers import traced_layers
from tide_export.trace.trace_model import TracedModel, trace

LAYERS = 5


def deep(architecture: str, layers: int, period: int = 2) -> PreTrainedModel:
    """``period``: of layers with a window, of which the last has none."""
    config = ARCHITECTURES[architecture]()
    config.num_hidden_layers = layers
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        config.layer_types = [["full_attention", "sliding_attention"][(i + 1) % period > 0] for i in range(layers)]
    elif getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i % len(config.layer_types)] for i in range(layers)]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def traced(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> tuple[TracedModel, list[int]]:
    """The trace, and how many layers torch ran for it, each time."""
    depths: list[int] = []
    whole = tracing._traced

    def counted(model: PreTrainedModel, kept: Sequence[LayerInfo]) -> object:
        depths.append(len(kept))
        return whole(model, kept)

    monkeypatch.setattr(tracing, "_traced", counted)
    return trace(model, repeat=True), depths


@pytest.mark.parametrize(
    ("architecture", "layers", "traced_ones"), slow_but([("llama", LAYERS, 2), ("gemma3", 9, 4)], ("gemma3", 9, 4))
)
def test_repeated_layers_are_the_models(
    architecture: str, layers: int, traced_ones: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer would have another one's weights or caches; of Gemma's, 0, 1, 3 and 7 are traced."""
    model = deep(architecture, layers, 4)  # its config names the type of each layer
    before = model.config.to_dict()
    graph, depths = traced(model, monkeypatch)
    assert depths == [traced_ones] and graph.num_layers == layers
    config = ExportConfig(max_seq_len=64, checkpoints="2")  # verified: the bundle computes what the eager model does
    write_bundle(LoadedModel(model, None, "deep"), tmp_path, config, ExportProgress(quiet=True), traced=graph)
    assert model.config.to_dict() == before and len(decoder_layers(model)) == layers
    assert [layer.self_attn.layer_idx for layer in decoder_layers(model)] == [*range(layers)]


@pytest.mark.slow
def test_code_that_reads_the_layers_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the modules shows that such layers differ: all would compute as the last one that was traced."""
    forward = LlamaDecoderLayer.forward

    def scaled(self: LlamaDecoderLayer, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return forward(self, hidden_states * (1 + 0.1 * self.self_attn.layer_idx), *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    assert traced(deep("llama", LAYERS), monkeypatch)[1] == [2, LAYERS]


KINDS = {
    "llama of 3": ("llama", 3, [0, 1, 2]),
    "llama": ("llama", 24, [0, 1]),
    "gemma2": ("gemma2", 26, [0, 1, 2, 3]),
    "gemma3": ("gemma3", 18, [0, 1, 5, 11]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_how_many_are_traced(kind: str) -> None:
    """Each kind needs two layers to compare; the rest of a model would be traced for nothing."""
    architecture, layers, numbers = KINDS[kind]
    model = deep(architecture, layers, 6 if architecture == "gemma3" else 2)
    assert traced_layers(model, decoder_layers(model), probe_layers(model)) == numbers


def test_a_layer_of_its_own_kind_is_traced() -> None:
    """One whose attributes or buffers differ would be replaced by another."""
    for change in (lambda layer: setattr(layer.mlp, "scale", 2.0), lambda layer: layer.register_buffer("mask", torch.ones(3))):
        model = deep("llama", 8)
        layers = decoder_layers(model)
        change(layers[6])
        assert traced_layers(model, layers, ()) == [0, 1, 6]
