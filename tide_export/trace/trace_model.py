"""Trace an unmodified HuggingFace causal LM once, to one ONNX graph with explicit cut points.

Marker operators of the domain ``tide`` appear in the traced graph; lowering passes replace all.

``tide::Attention(query, key, value, key_cache, value_cache, write_index, sinks)``
    Writes ``key``/``value`` [B, Nkv, S, D] into the caches [B, Nkv, Smax, D] at ``write_index`` [B], then attends causally:
    token s of sequence b sees the slots ``<= write_index[b] + s``, at most ``window`` of them when ``window`` > 0.
    ``sinks`` [N], optional: a logit per query head that joins the softmax and has no value.
    Outputs: attention [B, S, N, D], key_cache, value_cache. Attributes: scale, softcap (0 = off), window (0 = off).
``tide::CausalConv(rows, weight, state, bias)``
    Convolves each channel of ``rows`` [B, S, C] by ``weight`` [C, K], as if the ``state`` [B, K - 1, C] came before them.
    ``bias`` [C], optional. Outputs: rows [B, S, C], the new state. Attribute: activation (``none`` or ``silu``).
``tide::Recurrence(query, key, value, state, decay, beta)``
    See `traced_recurrence`. ``query``, ``key`` [B, S, query_heads · Dk], ``value`` [B, S, heads · Dv], ``state`` [B, heads, Dk,
    Dv], ``decay`` [B, S, heads] or [B, S, heads · Dk], ``beta`` [B, S, heads] with rule ``gated_delta`` only. Outputs:
    [B, S, heads · Dv], the new state. Attributes: rule, scale, query_heads, heads.
``tide::Boundary(hidden)``
    Identity on the residual stream [B, S, H] *before* layer ``index`` (``index`` = L: after the last layer, before the
    final norm). The exporter cuts there.
``tide::LoopStart(hidden)``
    Identity on what the first layer reads in a later loop.

The model's own code runs during tracing: `traced_attention` and `traced_recurrence` replace its attention, recurrences and cache,
`long_rotary` rotary embeddings with two sets of factors, and boundaries are forward hooks, so no architecture needs an adapter.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from tide_runtime.bundle.manifest import LayerInfo
from tide_runtime.errors import TideError, UnsupportedModelError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.onnx import OnnxExporterError
from transformers import PreTrainedModel

from tide_export.model.boundaries import at_boundaries, decoder_layers
from tide_export.model.long_rotary import both_factors
from tide_export.model.model_code import failing_code
from tide_export.model.probe import probe_layers
from tide_export.model.traced_attention import DOMAIN, KEY_VALUES, TracedLayer, run_layers
from tide_export.model.traced_recurrence import tide_layers
from tide_export.passes.canonicalize import simplify
from tide_export.sources.parameters import ParameterSource
from tide_export.trace.repeated_layers import of_layers, only_layers, repeat_layers, traced_layers
from tide_export.trace.trace_cache import kept_trace

OPSET = 24


@dataclass(frozen=True)
class TracedModel:
    """One traced graph: inputs position_ids, input_ids, write_index, and what each layer keeps in turn; outputs logits [B, S, V]
    and the same anew."""

    model: ir.Model
    layers: tuple[LayerInfo, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer keeps a state."""
        return any(layer.states for layer in self.layers)


def kept_names(layer: LayerInfo) -> list[str]:
    """Names of the caches of keys and values and of the states of a layer, without its number."""
    return [*(KEY_VALUES if layer.attends else ()), *(f"state_{number}" for number in range(len(layer.states)))]


class _Step(nn.Module):
    """The traced callable: one forward of the model over explicit caches."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[LayerInfo]) -> None:
        super().__init__()
        self.model = model
        self.names = [kept_names(layer) for layer in layers]

    def forward(self, position_ids, input_ids, write_index, kept):
        layers = [TracedLayer(dict(zip(n, k, strict=True)), write_index) for n, k in zip(self.names, kept, strict=True)]
        logits = run_layers(self.model, layers, input_ids, position_ids)
        return logits, [[layer.caches_out[name] for name in names] for layer, names in zip(layers, self.names, strict=True)]


def _mark(kind: str, index: int, hidden: torch.Tensor) -> torch.Tensor:
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{kind}", (hidden,), attrs={"index": index}, dtype=hidden.dtype, shape=hidden.shape, version=1
    )


def _marked(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Context in which the model's boundaries are marked."""
    return at_boundaries(model, partial(_mark, "Boundary"), partial(_mark, "LoopStart"))


def trace(
    model: PreTrainedModel,
    parameters: ParameterSource | None = None,
    repeat: bool = False,
    kept: Sequence[LayerInfo] | None = None,
) -> TracedModel:
    """Trace ``model`` (eval mode, final dtype) to opset-24 ONNX with dynamic batch, sequence and cache length.

    Args:
        parameters: the values of fake parameters, read when the graph's are.
        repeat: trace two layers of each kind only, see `repeated_layers`, or take their trace from the machine's cache; for
            graphs that are verified.
        kept: what each layer keeps, where it was probed before.

    Raises UnsupportedModelError if torch cannot export the model's code.
    """
    kept = tuple(kept or probe_layers(model))
    layers = decoder_layers(model)
    numbers = _layers_to_trace(model, layers, kept) if repeat else range(len(layers))
    with only_layers(model, layers, numbers):
        of_these = of_layers(kept, len(layers), numbers)
        make = partial(_traced, model, of_these)
        traced = kept_trace(model, of_these, make) if repeat else make()
    if len(numbers) < len(layers) and not repeat_layers(traced, model, layers, kept, numbers):
        traced = _traced(model, kept)
    if parameters is not None:
        _defer_values(traced.graph, parameters)
    return TracedModel(traced, kept)


def _layers_to_trace(model: PreTrainedModel, layers: nn.ModuleList, kept: Sequence[LayerInfo]) -> Sequence[int]:
    """Numbers of the layers to trace. Of a looped model all, unless its code numbers the caches of fewer layers as
    `repeat_layers` does."""
    numbers = traced_layers(model, layers, kept)
    if len(kept) == len(layers) or len(numbers) == len(layers):
        return numbers
    with only_layers(model, layers, numbers), contextlib.suppress(UnsupportedModelError):
        if probe_layers(model) == of_layers(kept, len(layers), numbers):
            return numbers
    return range(len(layers))


def _traced(model: PreTrainedModel, kept: Sequence[LayerInfo]) -> ir.Model:
    batch, seq, slots = 2, 5, 16
    ids = torch.arange(batch * seq).reshape(batch, seq) % model.config.get_text_config().vocab_size
    positions = torch.arange(seq).expand(batch, seq).contiguous()
    args = (positions, ids, torch.zeros(batch, dtype=torch.long), [_empty(one, kept, batch, slots, model.dtype) for one in kept])
    dim = torch.export.Dim
    b, s, t = dim("batch", min=1, max=4096), dim("seq", min=1, max=1 << 20), dim("slots", min=1, max=1 << 20)
    by_layer = [[{0: b, 2: t} if name in KEY_VALUES else {0: b} for name in kept_names(one)] for one in kept]
    dynamic = ({0: b, 1: s}, {0: b, 1: s}, {0: b}, by_layer)
    with tide_layers(model), both_factors(model), _marked(model):
        return export_module(_Step(model, kept), args, dynamic, model)


def export_module(step: nn.Module, args: tuple, dynamic: tuple, named: nn.Module) -> ir.Model:
    """``step`` as a simplified graph, with the dynamic dimensions of its ``args``.

    Raises UnsupportedModelError, which names the class of ``named``, if torch cannot export its code.
    """
    with torch.no_grad(), _quiet():
        try:
            program = torch.onnx.export(
                step, args, dynamo=True, opset_version=OPSET, dynamic_shapes=dynamic, optimize=False, verbose=False
            )
        except OnnxExporterError as error:
            raise _reason(named, error) from error
    assert program is not None
    for node in program.model.graph.all_nodes():  # where in the model it is from: 19 of 20 bytes, and nothing reads them
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    simplify(program.model, {name for name, _ in step.named_parameters(remove_duplicate=False)})
    return program.model


def _empty(layer: LayerInfo, kept: Sequence[LayerInfo], batch: int, slots: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What one of the layers ``kept`` keeps, for the trace."""
    kv = layer.kv if layer.kv_source is None else kept[layer.kv_source].kv
    sizes = [(kv.heads, slots, kv.key_dim), (kv.heads, slots, kv.value_dim)] if kv is not None else []
    caches = [torch.zeros(batch, *size, dtype=dtype) for size in sizes]
    return [*caches, *(torch.zeros(batch, *state.shape) for state in layer.states)]


def _defer_values(graph: ir.Graph, parameters: ParameterSource) -> None:
    """Put the values of ``parameters`` in the place of fake ones; the trace puts ``model.`` before a parameter's name."""
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if isinstance(getattr(tensor, "raw", None), FakeTensor):
            read = partial(parameters.value, name.removeprefix("model."))
            made = ir.LazyTensor(lambda read=read: TorchTensor(read()), dtype=tensor.dtype, shape=tensor.shape, name=name)
            value.const_value = made


def _reason(model: nn.Module, error: BaseException) -> TideError:
    """The place of the exporter's error, whose own message is pages of torch.export advice."""
    place = failing_code(model, error)
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, TideError):
        return error
    return UnsupportedModelError(
        f"{type(model).__name__} is not supported, because torch {torch.__version__} cannot export {place} to ONNX; please "
        "report the model's config"
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
