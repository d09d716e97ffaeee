"""Target ``torch``: a bundle's graphs as torch calls, on a GPU or the processor, with one form of a graph for all steps.

A step is [B, S] tokens, padded in uneven steps. Captured graphs hold kernels and memsets, which conditional bodies allow, so
loops on the device run on every GPU that torch supports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import cast

import torch
from torch import Tensor

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.backends.device.control_flow import Enqueue
from tide_runtime.backends.device.cuda_device import CudaDevice
from tide_runtime.backends.device.device_caches import GROWING_SLOTS
from tide_runtime.backends.device.device_step import DeviceBackend, DeviceContext, DeviceStep, DeviceTensor
from tide_runtime.backends.device.device_target import DeviceTarget, machine_key
from tide_runtime.backends.device.element_types import ELEMENT_TYPES, ElementType
from tide_runtime.backends.graph_contract import check_interface, decoder_layers, read_name
from tide_runtime.backends.onnxruntime.threads import ThreadOptions
from tide_runtime.backends.required_memory import require_room
from tide_runtime.backends.step_arrays import StepShape
from tide_runtime.backends.torch.graph_file import DeviceWeights, read_graph
from tide_runtime.backends.torch.prefix_blocks import TorchPrefixBlocks
from tide_runtime.backends.torch.stream import CudaStream, ProcessorDevice, ProcessorStream, TorchStream
from tide_runtime.backends.torch.torch_graph import TorchGraph
from tide_runtime.bundle import Bundle

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
}


class TorchBackend(DeviceTarget):
    """The target ``torch`` of a bundle on ``stream``. Several threads may run steps, each with its own ``ExecutionContext``."""

    name = "torch"
    has_prefix_blocks = True
    no_loop = None
    # Captured steps are child graphs, so that what a conditional body refuses is an error (see `TensorRtBackend`), and cuBLAS
    # and the pool of intermediate tensors serve one stream.
    fixed_stream = True
    min_slots: int | None = GROWING_SLOTS  # attention reads all slots that it is bound to
    input_types: Mapping[str, ElementType] = {}

    def __init__(self, bundle: Bundle, target: str, stream: TorchStream) -> None:
        self.manifest = bundle.manifest
        self.device = stream.device
        self._stream = stream
        self._bundle = bundle
        self.target = target
        self._files = bundle.manifest.targets[target].graphs
        self.element = ELEMENT_TYPES[self.manifest.dtype]
        self.layers = decoder_layers(self.manifest, self._files)
        self.launches: dict[str, int] = Counter()
        self._weights = DeviceWeights(stream.place)
        self._programs = {name: self._program(name) for name in self.layers}
        stream.wait_for_weights()
        last = self._programs[self.manifest.segments[-1].name].graph.types["logits"]
        self.logits_element = next(ELEMENT_TYPES[name] for name, dtype in _DTYPES.items() if dtype == last)

    @classmethod
    def load(cls, bundle: Bundle, target: str, threads: ThreadOptions, kind: str, ordinal: int) -> TorchBackend:
        """Load the graphs of ``target``. ``kind``: ``cuda``, ``cpu``, or ``auto``: the GPU where torch sees one.

        Raises BundleError when a graph breaks the contract or has operators that no torch function computes, TargetError when the
        GPU cannot be used.
        """
        if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
            device = CudaDevice(ordinal)
            torch.cuda.empty_cache()  # what torch keeps of freed memory is free for the weights
            require_room(bundle, target, device)
            stream: TorchStream = CudaStream(device)
        else:
            torch.set_num_threads(threads.resolved)
            stream = ProcessorStream(ProcessorDevice())
        backend = cls(bundle, target, stream)
        library = f"torch {torch.__version__}, threads {threads.resolved}"
        backend.machine_key = machine_key(bundle, target, stream.device.name, library)
        return backend

    def context(self, capacity: int, prefix_blocks: int = 0) -> ExecutionContext:
        context = DeviceContext(cast(DeviceBackend, self), capacity)
        if prefix_blocks:
            context.prefix_blocks = TorchPrefixBlocks(self._stream, context, prefix_blocks)
        return cast(ExecutionContext, context)  # step arrays are views of device memory

    def form(self, graph: str, shape: StepShape) -> str:
        return graph

    def bind(self, form: str, step: DeviceStep, graph: str) -> Enqueue:
        program = self._programs[graph]
        stream = self._stream
        inputs, outputs = program.graph.inputs, program.graph.outputs
        given = {name: self._tensor(tensor) for name, tensor in step.tensors(graph, [*inputs, *outputs]).items()}
        wanted = {name: given.pop(name) for name in outputs}
        written = {name: tensor for name, tensor in wanted.items() if read_name(name) not in given}  # caches are, in place

        def work() -> None:
            made = program.run(given)
            for name, target in written.items():
                target.copy_(made[name])

        return lambda _: stream.run(work)

    def _program(self, name: str) -> TorchGraph:
        file = self._files[name]
        graph = read_graph(self._bundle.path(file))
        check_interface(self.manifest, name, file, graph.inputs, graph.outputs)
        return TorchGraph(name, graph, self._weights, self._stream.kernels)

    def _tensor(self, tensor: DeviceTensor) -> Tensor:
        dtype = _DTYPES[tensor.element.name]
        if tensor.on_host:  # which no function reads
            return torch.empty(tensor.shape, dtype=dtype)
        raw = self._stream.memory(tensor.pointer, prod(tensor.shape) * dtype.itemsize)
        return raw.view(dtype).view(tensor.shape)
