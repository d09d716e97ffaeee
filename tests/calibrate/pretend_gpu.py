"""A device that computes on the processor and refuses, as a GPU does, to mix its tensors with those of host memory.

Its tensors say that they are on `meta`, the one device that every build of torch has besides the processor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class PretendTensor(torch.Tensor):
    """``value``: its numbers, in host memory."""

    value: torch.Tensor

    @staticmethod
    def __new__(cls, value: torch.Tensor) -> PretendTensor:
        made: PretendTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, value.size(), strides=value.stride(), storage_offset=value.storage_offset(), dtype=value.dtype, device=DEVICE
        )
        return made

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class PretendGpu(TorchDispatchMode):
    """While active, tensors may be made on `DEVICE` and copied to and from it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func._can_decompose():  # calls that torch takes apart before the mode sees them, but not in inference mode
        with PretendGpu():
            return func.decompose(*args, **kwargs)
    args, kwargs = tree_map(_filled, (args, kwargs))
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
    pretend = any(isinstance(one, PretendTensor) for one in tensors)
    if pretend and func not in _COPIES and any(one.dim() and not isinstance(one, PretendTensor) for one in tensors):
        raise RuntimeError(f"{func} mixes tensors of host memory with tensors of the device")
    device = kwargs.get("device")
    here = pretend if device is None else torch.device(device) == DEVICE
    plain_args, plain_kwargs = tree_map(_value, (args, kwargs))
    if device is not None:
        plain_kwargs = plain_kwargs | {"device": torch.device("cpu")}
    if func is torch.ops.aten._to_copy.default and here != pretend:
        return _wrapped(func(*plain_args, **plain_kwargs).clone()) if here else func(*plain_args, **plain_kwargs).clone()
    out = func(*plain_args, **plain_kwargs)
    return return_and_correct_aliasing(func, args, kwargs, tree_map(_wrapped, out)) if here else out


def _filled(one: Any) -> Any:
    """`torch.tensor([], device=…)` makes its empty tensor without a call that the mode sees."""
    made_unseen = (
        isinstance(one, torch.Tensor) and not isinstance(one, PretendTensor) and one.device == DEVICE and not one.numel()
    )
    return PretendTensor(torch.empty(one.shape, dtype=one.dtype)) if made_unseen else one


def _value(one: Any) -> Any:
    return one.value if isinstance(one, PretendTensor) else one


def _wrapped(one: Any) -> Any:
    return PretendTensor(one) if isinstance(one, torch.Tensor) and not isinstance(one, PretendTensor) else one
