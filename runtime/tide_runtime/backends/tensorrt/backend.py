"""TensorRT and TensorRT-RTX: engines on the caller's stream, every tensor bound by address, no allocations in a step.

Each pair of graph and optimization profile has one TensorRT execution context per TIDE `ExecutionContext`. A step that is
captured in a CUDA graph has its own, because the graph records the bindings at capture. All share one scratch memory, since
they run one after the other on one stream. This backend has not run on a GPU yet; tests use a recorded API over host memory.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tide_runtime.backends.device.arena import Arena
from tide_runtime.backends.device.control_flow import Enqueue
from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.device_step import DeviceStep, DeviceTensor
from tide_runtime.backends.device.device_target import DeviceTarget, machine_key
from tide_runtime.backends.device.element_types import ELEMENT_TYPES, ElementType, element_type
from tide_runtime.backends.graph_contract import decoder_layers
from tide_runtime.backends.step_arrays import StepShape
from tide_runtime.backends.tensorrt.package import load_module
from tide_runtime.backends.tensorrt.refit import refit, stripped_graph
from tide_runtime.backends.tensorrt.validity import SLOWER
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.engine_info import EngineInfo
from tide_runtime.bundle.manifest import HEAD, TargetInfo
from tide_runtime.errors import BundleError, ParamsError, TargetError


class TensorRtBackend(DeviceTarget):
    """A ``trt-sm_*`` or ``rtx-*`` target on ``device``. ``trt``: the imported module."""

    # So that captured steps are child graphs: what a conditional body refuses is then an error. A call that made the capture of a
    # body itself invalid would end the process (a fault of the driver, cuda-python issue 2918).
    fixed_stream = True
    min_slots: int | None = None  # engines are built for a fixed number

    def __init__(self, bundle: Bundle, target: str, device: Device, trt: Any) -> None:
        self.manifest = bundle.manifest
        self.device = device
        self._trt = trt
        self.target = target
        self._info: TargetInfo = bundle.manifest.targets[target]
        self.name = self._info.backend
        self.element = ELEMENT_TYPES[self.manifest.dtype]
        self.layers = decoder_layers(self.manifest, self._info.engines)
        self.launches: dict[str, int] = Counter()
        tensors = {tensor.name: tensor for e in self._info.engines.values() for tensor in (*e.inputs, *e.outputs)}
        self.logits_element = element_type(tensors["logits"].dtype, f"logits of {target}")
        inputs = {tensor.name: tensor for e in self._info.engines.values() for tensor in e.inputs}
        self.input_types: Mapping[str, ElementType] = {
            name: element_type(tensor.dtype, name) for name, tensor in inputs.items() if tensor.dtype in ("int32", "int64")
        }
        copies = any(_separate_outputs(engine) for engine in self._info.engines.values())
        self.no_loop = "its engines do not update caches in place; the host queues the copies back" if copies else None
        device.use()
        self._log = trt.Logger(trt.Logger.WARNING)
        self._runtime = trt.Runtime(self._log)
        if "version-compatible" in (self._info.tool or ""):
            self._runtime.engine_host_code_allowed = True  # such engines contain the lean runtime that runs them
        exits = self.manifest.calibration.exits if self.manifest.calibration is not None else []
        self.engines = {n: self._engine(bundle, n) for n in self._info.engines if exits or n != HEAD}
        self._scratch_bytes = max(engine.device_memory_size_v2 for engine in self.engines.values())
        self._scratch = Arena(device, {"scratch": self._scratch_bytes})

    @classmethod
    def load(cls, bundle: Bundle, target: str, device: Device) -> TensorRtBackend:
        """Load the engines of ``target``.

        Raises:
            TargetError: the package is missing or not of the version that built the engines, or the GPU does not match.
        """
        info = bundle.manifest.targets[target]
        trt = load_module(info)
        backend = cls(bundle, target, device, trt)
        backend.machine_key = machine_key(bundle, target, device.name, f"{backend.name} {trt.__version__}")
        return backend

    def takes(self, rows: int, tokens: int) -> bool:
        return any(profile.takes(rows, tokens) for profile in self._info.profiles)

    def form(self, graph: str, shape: StepShape) -> str:
        return graph

    def bind(self, form: str, step: DeviceStep, graph: str) -> Enqueue:
        context = self._bound_context(step, graph)
        engine = self._info.engines[graph]
        inputs = [tensor.name for tensor in engine.inputs]
        tensors = step.tensors(graph, [*inputs, *(tensor.name for tensor in engine.outputs)])
        self._check_types(graph, tensors)
        copies = [_CopyBack.of(step, tensors, name) for name in _separate_outputs(engine)]
        captured = step.captured  # a reference to the step would be a cycle

        def enqueue(stream: int) -> None:
            if self.device.is_capturing and not context.is_capturable:
                raise TargetError(f"{self._info.tool} says that its engine of {graph} cannot be captured in a CUDA graph")
            if context.tensors is not tensors:
                context.bind(tensors, inputs)
            if not context.native.execute_async_v3(stream):
                raise BundleError(f"{self._info.tool} cannot run {graph} of {self.target}; export the bundle again")
            for copy in copies:
                self.device.copy(copy.cache, copy.output.pointer, copy.count_bytes)
            if captured and not self.device.is_capturing:
                context.ask_whether_capturable(stream)

        return enqueue

    def profile(self, batch_size: int, tokens: int) -> int:
        """Index of the optimization profile for steps of that size. Raises ParamsError when no profile fits."""
        for index, profile in enumerate(self._info.profiles):
            if profile.takes(batch_size, tokens):
                return index
        most = "; ".join(f"{p.name}: at most {p.rows[2]} sequences of {p.tokens[2]} tokens" for p in self._info.profiles)
        raise ParamsError(
            f"{self.target} has no profile for {batch_size} sequences of {tokens} tokens ({most}); set max_batch or "
            "prefill_chunk to what it has, or export with larger ones"
        )

    def _bound_context(self, step: DeviceStep, graph: str) -> _BoundContext:
        profile = self.profile(step.shape.batch_size, step.shape.seq)
        bound: _BoundContext | None = step.attached.get((graph, profile))
        if bound is None:
            context = self._new_context(graph, step.captured)
            if context is None:
                raise TargetError(f"{self._info.tool} gives no execution context for {graph}: GPU memory may be short")
            if not context.set_optimization_profile_async(profile, self.device.stream):
                raise TargetError(f"{graph} of {self.target} has no optimization profile {profile}; export the bundle again")
            context.set_device_memory(self._scratch.pointer, self._scratch_bytes)
            bound = step.attached[graph, profile] = _BoundContext(context)
        return bound

    def _new_context(self, graph: str, captured: bool) -> Any:
        """A TensorRT execution context with our scratch memory; for a capture, with its final kernels compiled eagerly."""
        engine = self.engines[graph]
        managed = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if hasattr(self._trt, "DynamicShapesKernelSpecializationStrategy"):  # TensorRT-RTX only
            options = engine.create_runtime_config()
            options.set_execution_context_allocation_strategy(managed)
            if captured:  # lazy specialization would swap kernels after the graph has captured the generic ones
                options.dynamic_shapes_kernel_specialization_strategy = self._trt.DynamicShapesKernelSpecializationStrategy.EAGER
            return engine.create_execution_context(options)
        return engine.create_execution_context(managed)

    def _engine(self, bundle: Bundle, graph: str) -> Any:
        path = bundle.path(self._info.graphs[graph])
        plan = path.read_bytes()
        if hasattr(self._runtime, "get_engine_validity"):  # TensorRT-RTX only
            validity, _ = self._runtime.get_engine_validity(plan)
            if validity == self._trt.EngineValidity.INVALID:
                raise TargetError(
                    f"{self._info.graphs[graph]} is not valid for this GPU and {self._info.tool}; export with "
                    f"--target {self.target} again, with the {self.name} installed here"
                )
            if validity == self._trt.EngineValidity.SUBOPTIMAL:
                warnings.warn(f"{path.name} of {self.target} is {SLOWER}; tide-inspect says why", RuntimeWarning, stacklevel=2)
        engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise TargetError(
                f"{self._info.graphs[graph]} was built by {self._info.tool} for {self._info.compute}, this machine's "
                f"{self.name} {self._trt.__version__} does not take it; export again on such a machine"
            )
        if (stripped := stripped_graph(path)) is not None:
            refit(self._trt, engine, self._log, stripped)
        return engine

    def _check_types(self, graph: str, tensors: dict[str, DeviceTensor]) -> None:
        """Raise BundleError when an element type differs: bindings are untyped addresses."""
        engine = self._info.engines[graph]
        for tensor in (*engine.inputs, *engine.outputs):
            given: ElementType = tensors[tensor.name].element
            if given.name != tensor.dtype:
                raise BundleError(
                    f"{tensor.name} of {graph} is {tensor.dtype}, the runtime has {given.name}; export with this tide-llm again"
                )


@dataclass
class _BoundContext:
    """A TensorRT execution context and the tensors it is currently bound to, whose memory it does not keep alive.

    ``is_capturable``: the answer of `ask_whether_capturable`, True before.
    """

    native: Any
    tensors: dict[str, DeviceTensor] | None = None
    is_capturable: bool = True

    def ask_whether_capturable(self, stream: int) -> None:
        """Ask TensorRT-RTX whether a run with the present shapes can be captured; TensorRT has no such query.

        Asked after a run and outside captures, which a call that synchronizes would end.
        """
        if hasattr(self.native, "is_stream_capturable"):
            self.is_capturable = self.native.is_stream_capturable(stream)

    def bind(self, tensors: dict[str, DeviceTensor], inputs: list[str]) -> None:
        for name, tensor in tensors.items():
            if name in inputs and not self.native.set_input_shape(name, tensor.shape):
                raise BundleError(f"{name} cannot have the shape {list(tensor.shape)}; export the bundle again")
            if not self.native.set_tensor_address(name, tensor.pointer):
                raise BundleError(f"the engine has no tensor {name}: the manifest belongs to other files; export again")
        self.tensors = tensors


@dataclass(frozen=True)
class _CopyBack:
    """Copy of a cache output back into its input after each run, for TensorRT before 10.15, which cannot alias the two."""

    cache: int
    output: Arena
    count_bytes: int

    @staticmethod
    def of(step: DeviceStep, tensors: dict[str, DeviceTensor], name: str) -> _CopyBack:
        """Bind the cache output ``name`` to separate memory."""
        tensor = tensors[name]
        count_bytes = math.prod(tensor.shape) * tensor.element.bytes
        output = step.context.buffers.get(**{name: count_bytes})
        tensors[name] = replace(tensor, pointer=output.pointer)
        return _CopyBack(tensor.pointer, output, count_bytes)


def _separate_outputs(engine: EngineInfo) -> list[str]:
    """Cache outputs that do not alias their inputs."""
    return [tensor.name for tensor in engine.outputs if "_cache_out_" in tensor.name and tensor.name not in engine.aliases]
