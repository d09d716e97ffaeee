"""Graphs of tiny models as an RTX target lowers them, traced once each and retyped: tracing takes longer than building."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx_ir as ir
import torch
from export.architectures import ARCHITECTURES
from transformers import AutoModelForCausalLM, PreTrainedModel

from tide_export.graphs.cut import CutGraph
from tide_export.passes.base import LoweringContext
from tide_export.targets.lower import lower, prepare
from tide_export.targets.rtx import RTX_TARGETS
from tide_export.trace.trace_model import TracedModel, trace

SLOTS = 64
# Gemma-2 alternates layers with and without a window.
LAYERS = {"llama": 2, "qwen3": 1, "gpt2": 1, "mistral": 1, "gemma2": 2}
DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class Traced:
    """An eager model in fp16, and its trace."""

    model: PreTrainedModel
    trace: TracedModel


@cache
def traced(name: str) -> Traced:
    """A tiny random model of the architecture."""
    torch.manual_seed(0)
    config = ARCHITECTURES[name]()
    config.num_hidden_layers = LAYERS[name]
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: LAYERS[name]]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
    return Traced(model, trace(model))


@cache
def lowered(name: str) -> CutGraph:
    """The whole model as one segment, for RTX targets, in fp16."""
    trace, target, context = copy_of(traced(name).trace), RTX_TARGETS[0], LoweringContext(SLOTS)
    prepare(trace, target, context)
    return lower(trace, target, [], context).graphs[0]


def copy_of(trace: TracedModel) -> TracedModel:
    return TracedModel(trace.model.clone(), trace.layers)


def segment(name: str, dtype: str) -> CutGraph:
    """The same in ``dtype``."""
    graph = lowered(name)
    return CutGraph(graph.name, retyped(graph.model.clone(), DTYPES[dtype]), graph.layers)


def retyped(model: ir.Model, dtype: ir.DataType) -> ir.Model:
    """Every fp16 tensor of ``model`` as ``dtype``, weights included."""
    graph = model.graph
    for value in (*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)):
        if value.dtype == ir.DataType.FLOAT16:
            value.type = ir.TensorType(dtype)  # a new one: a clone shares its types
            if value.const_value is not None:
                value.const_value = ir.tensor(np.asarray(value.const_value.numpy()).astype(dtype.numpy()), name=value.name)
    for node in graph:
        if node.op_type == "Cast" and node.attributes["to"].value == ir.DataType.FLOAT16:
            node.attributes["to"] = ir.AttrInt64("to", int(dtype))
    return model
