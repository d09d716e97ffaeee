"""Trace an unmodified HuggingFace causal LM once, to one ONNX graph with explicit cut points.

Two marker operators of the domain ``tide`` appear in the traced graph; lowering passes replace both.

``tide::Attention(query, key, value, key_cache, value_cache, write_index, sinks)``
    Writes ``key``/``value`` [B, Nkv, S, D] into the caches [B, Nkv, Smax, D] at ``write_index`` [B], then attends causally:
    token s of sequence b sees the slots ``<= write_index[b] + s``, at most ``window`` of them when ``window`` > 0.
    ``sinks`` [N], optional: a logit per query head that joins the softmax and has no value.
    Outputs: attention [B, S, N, D], key_cache, value_cache. Attributes: scale, softcap (0 = off), window (0 = off).
``tide::Boundary(hidden)``
    Identity on the residual stream [B, S, H] *before* layer ``index`` (``index`` = L: after the last layer, before the
    final norm). The exporter cuts there.

The model's own code runs during tracing: `traced_attention` replaces its attention and cache, `long_rotary` rotary embeddings
with two sets of factors, and boundaries are forward hooks, so no architecture needs an adapter.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from tide_runtime.errors import TideError, UnsupportedModelError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.onnx import OnnxExporterError
from transformers import PreTrainedModel

from tide_export.long_rotary import both_factors
from tide_export.parameters import ParameterSource
from tide_export.probe import probe_attention
from tide_export.repeated_layers import first_layers, repeat_layers, traced_depth
from tide_export.traced_attention import DOMAIN, KVShape, TracedCacheLayer, run_layers, tide_attention

OPSET = 24


@dataclass(frozen=True)
class TracedModel:
    """One traced graph: inputs input_ids, position_ids, write_index, caches; outputs logits [B, S, V] and the caches."""

    model: ir.Model
    kv_shapes: tuple[KVShape, ...]

    @property
    def num_layers(self) -> int:
        return len(self.kv_shapes)


class _Step(nn.Module):
    """The traced callable: one forward of the model over explicit caches."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, position_ids, input_ids, write_index, key_caches, value_caches):
        layers = [TracedCacheLayer(k, v, write_index) for k, v in zip(key_caches, value_caches, strict=True)]
        logits = run_layers(self.model, layers, input_ids, position_ids)
        return logits, [layer.keys for layer in layers], [layer.values for layer in layers]


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's decoder blocks: the one ModuleList as long as ``num_hidden_layers``."""
    count = model.config.get_text_config().num_hidden_layers
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    found = [m for m in found if not any(m is not o and m in o.modules() for o in found)]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__}: expected one list of {count} decoder layers, found {len(found)}; "
            "TIDE compiles decoders that are one stack of layers"
        )
    return found[0]


def _mark_boundary(hidden: torch.Tensor, index: int) -> torch.Tensor:
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::Boundary", (hidden,), attrs={"index": index}, dtype=hidden.dtype, shape=hidden.shape, version=1
    )


@contextlib.contextmanager
def _boundaries(layers: nn.ModuleList) -> Iterator[None]:
    """Forward hooks that mark the residual stream before each layer and after the last one."""

    def before(index: int) -> Callable[..., Any]:
        def hook(_module, args, kwargs):
            if args:
                return (_mark_boundary(args[0], index), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": _mark_boundary(kwargs["hidden_states"], index)}

        return hook

    def after(_module, _args, output):
        if isinstance(output, tuple):
            return (_mark_boundary(output[0], len(layers)), *output[1:])
        return _mark_boundary(output, len(layers))

    hooks = [layer.register_forward_pre_hook(before(i), with_kwargs=True) for i, layer in enumerate(layers)]
    hooks.append(layers[-1].register_forward_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def trace(model: PreTrainedModel, parameters: ParameterSource | None = None, repeat: bool = False) -> TracedModel:
    """Trace ``model`` (eval mode, final dtype) to opset-24 ONNX with dynamic batch, sequence and cache length.

    Args:
        parameters: the values of fake parameters, read when the graph's are.
        repeat: trace the first layers of each kind only, see `repeated_layers`; for graphs that are verified.

    Raises UnsupportedModelError if torch cannot export the model's code.
    """
    kv_shapes = probe_attention(model)
    layers = decoder_layers(model)
    depth = traced_depth(model, layers) if repeat else len(layers)
    with first_layers(model, layers, depth) as first:
        traced = _traced(model, first, kv_shapes[:depth])
    if depth < len(layers) and not repeat_layers(traced, model, layers, depth):
        traced = _traced(model, layers, kv_shapes)
    if parameters is not None:
        _defer_values(traced.graph, parameters)
    return TracedModel(traced, kv_shapes)


def _traced(model: PreTrainedModel, layers: nn.ModuleList, kv_shapes: Sequence[KVShape]) -> ir.Model:
    batch, seq, slots = 2, 5, 16
    keys = [torch.zeros(batch, s.heads, slots, s.key_dim, dtype=model.dtype) for s in kv_shapes]
    values = [torch.zeros(batch, s.heads, slots, s.value_dim, dtype=model.dtype) for s in kv_shapes]
    ids = torch.arange(batch * seq).reshape(batch, seq) % model.config.get_text_config().vocab_size
    positions = torch.arange(seq).expand(batch, seq).contiguous()
    args = (positions, ids, torch.zeros(batch, dtype=torch.long), keys, values)
    dim = torch.export.Dim
    b, s, t = dim("batch", min=1, max=4096), dim("seq", min=1, max=1 << 20), dim("slots", min=1, max=1 << 20)
    dynamic = ({0: b, 1: s}, {0: b, 1: s}, {0: b}, [{0: b, 2: t}] * len(keys), [{0: b, 2: t}] * len(values))
    with torch.no_grad(), tide_attention(model), both_factors(model), _boundaries(layers), _quiet():
        try:
            program = torch.onnx.export(
                _Step(model), args, dynamo=True, opset_version=OPSET, dynamic_shapes=dynamic, optimize=False, verbose=False
            )
        except OnnxExporterError as error:
            raise _reason(model, error) from error
    assert program is not None
    return program.model


def _defer_values(graph: ir.Graph, parameters: ParameterSource) -> None:
    """Put the values of ``parameters`` in the place of fake ones; the trace puts ``model.`` before a parameter's name."""
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if isinstance(getattr(tensor, "raw", None), FakeTensor):
            read = partial(parameters.value, name.removeprefix("model."))
            made = ir.LazyTensor(lambda read=read: TorchTensor(read()), dtype=tensor.dtype, shape=tensor.shape, name=name)
            value.const_value = made


def _reason(model: PreTrainedModel, error: BaseException) -> TideError:
    """The root cause of the exporter's error, whose own message is pages of torch.export advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, TideError):
        return error
    return UnsupportedModelError(
        f"{type(model).__name__} is not supported, because torch {torch.__version__} cannot export its code to ONNX "
        f"({type(error).__name__}: {error}); please report the model's config"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's log lines about missing optional packages; errors are still raised."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
