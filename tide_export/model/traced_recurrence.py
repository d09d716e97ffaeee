"""Replace a model's causal convolutions and recurrences by the markers ``tide::CausalConv`` and ``tide::Recurrence``.

Transformers' model files define the functions of `_REPLACED` as globals of the same names and call them by these, so setting the
globals reaches every family without an adapter. States are in fp32, and the model's code does not look into them: those of a
convolution are its last raw inputs [B, K - 1, C], those of a recurrence are [B, H, Dk, Dv].

A recurrence is, per head, with S [Dk, Dv] and the logarithm of a decay g (a number, or one for each key dimension):

    gated         S = exp(g) S + kᵀ v                               (Mamba: Gu & Dao 2023, arXiv:2312.00752; Mamba-2: 2405.21060)
    gated_delta   S = exp(g) S;  S = S + kᵀ β (v - k S)             (Yang et al. 2024, arXiv:2412.06464)
    output        scale · q S
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator

import torch
from tide_runtime.bundle.manifest import StateInfo
from tide_runtime.errors import UnsupportedModelError
from torch import Tensor, nn
from transformers import PreTrainedModel

from tide_export.model.traced_attention import DOMAIN, RECURRENT, TracedLayer, tide_attention

_L2_EPSILON = 1e-6  # transformers' l2norm adds it to the sum of squares
_ACTIVATIONS = (None, "silu", "swish")


@contextlib.contextmanager
def tide_layers(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model's attention, convolutions and recurrences are markers.

    Raises UnsupportedModelError for a function of a known name that takes what is not known.
    """
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    saved = [(file, name, getattr(file, name)) for file in files for name in _REPLACED if hasattr(file, name)]
    for file, name, function in saved:
        unknown = inspect.signature(function).parameters.keys() - inspect.signature(_REPLACED[name]).parameters.keys()
        if unknown - {"kwargs"}:
            raise UnsupportedModelError(
                f"{type(model).__name__} is not supported, because {file.__name__}.{name} takes {', '.join(sorted(unknown))}, "
                "which TIDE does not know"
            )
    with tide_attention(model):
        for file, name, _ in saved:
            setattr(file, name, _REPLACED[name])
        try:
            yield
        finally:
            for file, name, function in saved:
                setattr(file, name, function)


def with_limits_of_config(model: PreTrainedModel) -> PreTrainedModel:
    """``model``, whose scans clamp time steps to the config's ``time_step_limit``, or not at all where it has none.

    Transformers' scans of Nemotron-H and Zamba2 clamp to ``time_step_min``, by which a model is initialised: its function for one
    token does not, nor do the implementations that they were trained with, vLLM's and llama.cpp's.
    """
    limits = getattr(model.config.get_text_config(), "time_step_limit", None) or (0.0, float("inf"))
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(limits)
    return model


def _recurrent_layer() -> TracedLayer:
    if not RECURRENT:
        raise UnsupportedModelError("a convolution or recurrence without a state in the cache is not supported")
    return RECURRENT[-1]


def _causal_conv1d(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: object
) -> Tensor:
    """Convolve the channels of [B, C, S] by ``weight`` [C, K], each by itself."""
    layer = _recurrent_layer()
    if not layer.convolves or activation not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"a convolution without a state in the cache, or with activation {activation!r}, is not supported"
        )
    layer.convolves = False
    rows = hidden_states.transpose(1, 2).float()
    name, state = layer.state(StateInfo("convolution", [weight.shape[1] - 1, weight.shape[0]]), rows.shape[0])
    output, layer.caches_out[name] = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::CausalConv",
        (rows, weight.float(), state, *(() if bias is None else (bias.float(),))),
        attrs={"activation": "none" if activation is None else "silu"},
        dtypes=(rows.dtype, state.dtype),
        shapes=(rows.shape, state.shape),
        version=1,
    )
    return output.transpose(1, 2).to(hidden_states.dtype)


def _recurrence(
    rule: str, scale: float, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output [B, S, H, Dv] in fp32, and the new state [B, H, Dk, Dv].

    Args:
        query, key: [B, S, Hk, Dk]; H / Hk consecutive heads share one of Hk.
        value: [B, S, H, Dv].
        decay: logarithms [B, S, H] or [B, S, H, Dk].
        beta: [B, S, H].
    """
    layer = _recurrent_layer()
    heads, width = value.shape[2:]
    name, state = layer.state(StateInfo("recurrence", [heads, key.shape[3], width]), value.shape[0])
    rows = [tensor.flatten(2).float() for tensor in (query, key, value)]
    gates = [tensor.flatten(2).float() for tensor in (decay, beta) if tensor is not None]
    output, layer.caches_out[name] = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::Recurrence",
        (*rows, state, *gates),
        attrs={"rule": rule, "scale": scale, "query_heads": query.shape[2], "heads": heads},
        dtypes=(state.dtype, state.dtype),
        shapes=(rows[2].shape, state.shape),
        version=1,
    )
    return output.unflatten(2, (heads, width)), layer.caches_out[name]


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, with one decay a head or, as Kimi's, for each key dimension."""
    dtype = query.dtype
    scale = query.shape[-1] ** -0.5
    if use_qk_l2norm_in_kernel:
        query, key = _l2_normed(query), _l2_normed(key)
    output, state = _recurrence("gated_delta", scale, query, key, value, g, beta)
    return output.to(dtype), state


def _l2_normed(x: Tensor) -> Tensor:
    """x / sqrt(Σ x² + ε) as an RMS norm, which is one node. The kernel's own norm has another epsilon, 1e-12: 2.6e-2 off where
    rows are small."""
    x, width = x.float(), x.shape[-1]
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _L2_EPSILON / width)
    return normed * torch.full((width,), width**-0.5)


def _mamba2_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """The scan of Mamba-2: query C, key B, value dt x, decay A dt; ``hidden_states`` x [B, S, H, P], ``dt`` [B, S, H].

    Transformers clamps dt to its limits here and not in its function for one token; here it is one function, see
    `with_limits_of_config`.
    """
    if z is not None:
        raise UnsupportedModelError("a gate inside the scan of Mamba-2 is not supported")
    dt = _step_sizes(dt, dt_bias, dt_softplus).float()
    if dt_limit[0] > 0 or dt_limit[1] != float("inf"):  # a softplus is above 0
        dt = dt.clamp(*dt_limit)
    x = hidden_states.float()
    output, state = _recurrence("gated", 1.0, C, B, x * dt[..., None], A.float() * dt)
    return (output if D is None else output + x * D[:, None]), state


def _selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """The scan of Mamba-1, whose channels are heads of one value: ``hidden_states`` x, ``dt`` [B, C, S], ``A`` [C, N], ``B`` and
    ``C`` [B, N, S]."""
    x, rates = hidden_states.transpose(1, 2), _step_sizes(dt.transpose(1, 2), delta_bias, delta_softplus)  # [B, S, C]
    query, key = (tensor.transpose(1, 2).unsqueeze(2) for tensor in (C, B))
    value = (rates * x).unsqueeze(3)
    output, state = _recurrence("gated", 1.0, query, key, value, A.float() * rates.float().unsqueeze(3))
    output = output.squeeze(3)
    output = (output if D is None else output + x * D).transpose(1, 2)
    return (output if z is None else output * nn.functional.silu(z)), state


def _step_sizes(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return nn.functional.softplus(dt) if softplus else dt


_REPLACED: dict[str, Callable[..., object]] = {
    "causal_conv1d_fn": _causal_conv1d,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba_selective_scan": _selective_scan,
}
