"""Preparation of a launch from a caller's tensors, common to all kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Structure
from typing import Any

from tide_runtime.errors import ParamsError

from tide_plugins.launch.device_array import ITEM_BYTES, DeviceArray
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.launch.prepared_launch import PreparedLaunch, Step
from tide_plugins.launch.stream_handle import stream_handle
from tide_plugins.launch.tensor_contract import ContractChecker, Tensor
from tide_plugins.params import PARAMS, POINTER
from tide_plugins.plans import LaunchPlan

_ALIGNMENT = 256  # bytes, of each part of the scratch memory


class KernelCall:
    """One call of ``kernel``, its tensors checked against their contract.

    Args:
        kernel: a name in `kernels.KERNELS`.
        contract: the kernel's tensors.
        values: the caller's tensors by name; None: omitted.
        stream: the stream that will use them.

    Raises:
        ParamsError: a tensor is unknown, missing, or breaks the contract.
    """

    def __init__(
        self,
        library: KernelLibrary,
        kernel: str,
        contract: Sequence[Tensor],
        values: Mapping[str, DeviceArray | None],
        stream: Any,
    ) -> None:
        self.library = library
        self.kernel = kernel
        self._stream = stream_handle(stream)
        if unknown := sorted(set(values) - {tensor.name for tensor in contract}):
            raise ParamsError(f"{kernel} has no {', '.join(unknown)}; its tensors are {', '.join(t.name for t in contract)}")
        self._arrays = {name: array for name, array in values.items() if array is not None}
        self._sizes, element = ContractChecker(kernel, library.driver.device).bind(contract, self._arrays)
        self.dtype = element or "f32"

    @property
    def element_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def size(self, dimension: str) -> int:
        """Size of a dimension of the contract, or 0 when none of the tensors has it."""
        return self._sizes.get(dimension, 0)

    def params(self, **numbers: float) -> Any:
        """The kernel's parameters with ``numbers``; the other numbers in it are the sizes of the contract's dimensions."""
        struct = PARAMS[self.kernel]
        counts = {name for name, kind, *_ in struct._fields_ if kind is not POINTER}  # a tensor and a dimension may share a name
        return struct(**{name: size for name, size in self._sizes.items() if name in counts} | numbers)

    def require(self, condition: bool, message: str) -> None:
        """Raise ParamsError unless ``condition`` holds."""
        if not condition:
            raise ParamsError(f"{self.kernel}: {message}")

    def prepare(
        self,
        params: Structure,
        plans: Mapping[str, LaunchPlan],
        scratch: Mapping[str, int],
        arguments: Mapping[str, tuple[str, ...]] | None = None,
    ) -> PreparedLaunch:
        """Prepare the launches of ``plans`` (form → plan), in this order.

        Args:
            params: the kernel's parameters, whose pointers are set here.
            scratch: pointer field → bytes of zeroed memory owned by the launch.
            arguments: form → fields of ``params`` that it takes one by one; without it, forms take ``params`` by value.
        """
        fields = arguments or {}
        steps = tuple(
            Step(self.library.entry(self.kernel, form, self.dtype, plan), plan, fields.get(form, ()))
            for form, plan in plans.items()
        )
        for name, array in self._arrays.items():
            setattr(params, name, array.pointer)
        memory = self._scratch(params, {name: size for name, size in scratch.items() if size})
        return PreparedLaunch(self.library, steps, params, (memory, *self._arrays.values()))

    def _scratch(self, params: Structure, sizes: Mapping[str, int]) -> Any:
        if not sizes:
            return None
        padded = {name: -(-size // _ALIGNMENT) * _ALIGNMENT for name, size in sizes.items()}
        memory = self.library.driver.zeros(sum(padded.values()), self._stream)
        address = memory.pointer
        for name, size in padded.items():
            setattr(params, name, address)
            address += size
        return memory
