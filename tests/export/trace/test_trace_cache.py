"""A trace from the machine's cache is the trace of the model at hand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from export.architectures import ARCHITECTURES, random_model, tiny_model
from transformers.models.llama.modeling_llama import LlamaMLP

from tide_export.model.probe import probe_layers
from tide_export.trace import trace_cache
from tide_export.trace.trace_model import TracedModel, trace


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path))
    return tmp_path / "traces"


def content(traced: TracedModel) -> bytes:
    return ir.to_proto(traced.model).SerializeToString()


def test_a_second_model_of_a_shape_is_not_traced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: each file of a family takes the seconds of a trace again; or its bundle has the first one's weights; or what a
    damaged file holds."""
    model, other, name = tiny_model("llama"), tiny_model("llama"), "model.layers.0.mlp.up_proj.weight"
    expected = content(trace(model, repeat=True))
    [file] = cache.iterdir()
    with monkeypatch.context() as patched:
        patched.setattr("tide_export.trace.trace_model.export_module", lambda *_: pytest.fail("traced again"))
        assert content(trace(model, repeat=True)) == expected
        other.get_parameter(name).data += 1
        second = trace(other, repeat=True).model.graph.initializers[f"model.{name}"].const_value
    assert second is not None and torch.equal(torch.from_numpy(second.numpy()), other.get_parameter(name))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert content(trace(model, repeat=True)) == expected


OTHERS: list[Mapping[str, Any]] = [
    {},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
    {"rms_norm_eps": 0.1},
    {"num_key_value_heads": 1},
    {"tie_word_embeddings": True},
    {"hidden_act": "gelu"},
]


def test_what_a_trace_depends_on_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: a model runs with the rotary frequencies, the norms' epsilon or the heads of another one."""
    keys = list[str]()
    with monkeypatch.context() as patched:
        patched.setattr(LlamaMLP, "forward", lambda self, states: states)
        model = tiny_model("llama")
        keys.append(trace_cache._description(model, probe_layers(model)))
    for options in OTHERS:
        config = ARCHITECTURES["llama"]()
        for name, value in options.items():
            setattr(config, name, value)
        model = random_model(config)
        keys.append(trace_cache._description(model, probe_layers(model)))
    assert len(set(keys)) == 1 + len(OTHERS)


def test_code_of_the_model_s_own_is_always_traced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: code that came with a model has changed, and its old trace is used."""
    monkeypatch.setattr(trace_cache, "_KNOWN_CODE", ("other.",))
    made = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)
    assert trace_cache.kept_trace(tiny_model("llama"), [], lambda: made) is made
    assert not cache.exists()
