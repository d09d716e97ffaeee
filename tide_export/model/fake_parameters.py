"""Models whose parameters have shape and dtype but no memory: FakeTensors on the CPU, on which code runs without computing.

Buffers are real: the model's constructor computes them, and nothing else could.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import PreTrainedModel


def without_parameters(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """The model that ``make`` builds, in eval mode, with fake parameters; each is freed before the next is allocated."""
    with _fake_registration(FakeTensorMode(allow_non_fake_inputs=True)):
        return make().eval()


@contextmanager
def _fake_registration(mode: FakeTensorMode) -> Iterator[None]:
    """Context in which a parameter becomes fake when it gets its place in a module, before anything initialises it."""
    register = nn.Module.register_parameter

    def register_fake(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not isinstance(parameter, FakeTensor):
            parameter = _fake(mode, parameter, parameter.dtype)
        register(module, name, parameter)

    nn.Module.register_parameter = register_fake  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _fake(mode: FakeTensorMode, like: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
    with mode:
        fake = nn.Parameter(torch.empty(like.shape, dtype=dtype), requires_grad=False)
    fake._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' initialisers leave it alone: some read values
    return fake


def fake_mode(model: nn.Module) -> AbstractContextManager[object]:
    """The context in which a model with fake parameters runs; for other models, one that does nothing."""
    parameter = next(model.parameters(), None)
    return parameter.fake_mode if isinstance(parameter, FakeTensor) else nullcontext()


def is_fake(model: nn.Module) -> bool:
    """Whether its parameters have no values."""
    return isinstance(next(model.parameters(), None), FakeTensor)


def convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Give fake parameters of floating-point numbers another ``dtype``."""

    def converted(name: str, fake: FakeTensor) -> nn.Parameter:
        return _fake(fake.fake_mode, fake, dtype) if fake.is_floating_point() else cast(nn.Parameter, fake)

    _replace(model, converted)


def materialise(model: nn.Module, value: Callable[[str], torch.Tensor]) -> None:
    """Give the fake parameters of ``model`` their ``value`` by name; it then takes all of its memory."""
    _replace(model, lambda name, fake: nn.Parameter(value(name), requires_grad=False))


def _replace(model: nn.Module, make: Callable[[str, FakeTensor], nn.Parameter]) -> None:
    """Put another parameter in the place of each; those that were one stay one."""
    old = list(model.named_parameters(remove_duplicate=False))
    made: dict[int, nn.Parameter] = {}
    for name, parameter in old:
        if id(parameter) not in made:
            assert isinstance(parameter, FakeTensor)
            made[id(parameter)] = make(name, parameter)
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module).register_parameter(leaf, made[id(parameter)])
