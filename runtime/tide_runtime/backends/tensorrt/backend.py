"""TensorRT and TensorRT-RTX: engines on caller's streams, every tensor bound by its address, nothing allocated in a step.

A TensorRT execution context belongs to one `ExecutionContext`, one graph and one optimization profile, or to one step of a
captured graph, which keeps what the context was. All contexts share one scratch memory: on one stream one of them runs at a time.
It has not run on a GPU: tests drive it with a recorded API over host memory.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.backends.device.arena import Arena
from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.device_step import DeviceContext, DeviceStep, DeviceTensor
from tide_runtime.backends.device.element_types import ELEMENT_TYPES, ElementType, element_type
from tide_runtime.backends.device.program import Enqueue
from tide_runtime.backends.step_arrays import StepShape
from tide_runtime.backends.tensorrt.package import load_module
from tide_runtime.backends.tensorrt.refit import refit, stripped_graph
from tide_runtime.backends.tensorrt.validity import SLOWER
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.engine_info import EngineInfo
from tide_runtime.bundle.manifest import HEAD, TargetInfo
from tide_runtime.errors import BundleError, ParamsError, TargetError
from tide_runtime.plugins import plugin


class TensorRtBackend:
    """A ``trt-sm_*`` or ``rtx-*`` target on ``device``. ``trt``: the imported module."""

    pads_sequences, fixed_stream = True, False

    def __init__(self, bundle: Bundle, target: str, device: Device, trt: Any) -> None:
        self.manifest, self.device, self._trt, self.target = bundle.manifest, device, trt, target
        self._info: TargetInfo = bundle.manifest.targets[target]
        self.name = self._info.backend
        self.element = ELEMENT_TYPES[self.manifest.dtype]
        self.layers = {g.name: g.layers[1] - g.layers[0] if g.layers else 0 for g in self.manifest.graphs}
        self.launches: dict[str, int] = Counter()
        tensors = {tensor.name: tensor for e in self._info.engines.values() for tensor in (*e.inputs, *e.outputs)}
        self.logits_element = element_type(tensors["logits"].dtype, f"logits of {target}")
        inputs = {tensor.name: tensor for engine in self._info.engines.values() for tensor in engine.inputs}
        self.input_types: Mapping[str, ElementType] = {
            name: element_type(tensor.dtype, name) for name, tensor in inputs.items() if tensor.dtype in ("int32", "int64")
        }
        self.copies_caches = any(_apart(engine) for engine in self._info.engines.values())
        device.use()
        self._log = trt.Logger(trt.Logger.WARNING)
        _load_plugins(self._info)
        self._runtime = trt.Runtime(self._log)
        if "version-compatible" in (self._info.tool or ""):
            self._runtime.engine_host_code_allowed = True  # such engines bring the runtime that runs them
        exits = self.manifest.calibration.exits if self.manifest.calibration is not None else []
        self.engines = {n: self._engine(bundle, n) for n in self._info.engines if exits or n != HEAD}
        self._scratch_bytes = max(engine.device_memory_size_v2 for engine in self.engines.values())
        self._scratch = Arena(device, {"scratch": self._scratch_bytes})

    @classmethod
    def load(cls, bundle: Bundle, target: str, device: Device) -> TensorRtBackend:
        """Load the engines of ``target``.

        Raises:
            TargetError: the package is missing or of another version than built the engines, or they are not for this GPU.
        """
        info = bundle.manifest.targets[target]
        trt = load_module(info)
        return cls(bundle, target, device, trt)

    def context(self, capacity: int) -> ExecutionContext:
        return cast(ExecutionContext, DeviceContext(self, capacity))  # arrays of a step stand for device memory

    def form(self, graph: str, shape: StepShape) -> str:
        return graph

    def bind(self, form: str, step: DeviceStep, graph: str) -> Enqueue:
        context = self._context(step, graph)
        engine = self._info.engines[graph]
        inputs = [tensor.name for tensor in engine.inputs]
        tensors = step.tensors(graph, False, [*inputs, *(tensor.name for tensor in engine.outputs)])
        self._check_types(graph, tensors)
        copies = [_Copy.of(step, tensors, name) for name in _apart(engine)]

        def enqueue(stream: int) -> None:
            if context.bound is not tensors:
                context.bind(tensors, inputs)
            if not context.context.execute_async_v3(stream):
                raise BundleError(f"{self._info.tool} cannot run {graph} of {self.target}; export the bundle again")
            for copy in copies:
                self.device.copy(copy.cache, copy.made.pointer, copy.count_bytes)

        return enqueue

    def profile(self, rows: int, tokens: int) -> int:
        """Index of the optimization profile for steps of that size. Raises ParamsError when none takes them."""
        for index, profile in enumerate(self._info.profiles):
            if profile.takes(rows, tokens):
                return index
        most = "; ".join(f"{p.name}: at most {p.rows[2]} rows of {p.tokens[2]} tokens" for p in self._info.profiles)
        raise ParamsError(
            f"{self.target} has no profile for {rows} rows of {tokens} tokens ({most}); set max_batch or prefill_chunk to what "
            "it has, or export with larger ones"
        )

    def _context(self, step: DeviceStep, graph: str) -> _Context:
        profile = self.profile(step.shape.batch_size, step.shape.seq)
        kept = step.attached.get((graph, profile))
        if kept is None:
            context = self._new_context(graph, step.captured)
            if context is None:
                raise TargetError(f"{self._info.tool} gives no execution context for {graph}: GPU memory may be short")
            if not context.set_optimization_profile_async(profile, self.device.stream):
                raise TargetError(f"{graph} of {self.target} has no optimization profile {profile}; export the bundle again")
            context.set_device_memory(self._scratch.pointer, self._scratch_bytes)
            kept = step.attached[graph, profile] = _Context(context)
        return kept

    def _new_context(self, graph: str, captured: bool) -> Any:
        """With memory of ours; if it is to be ``captured``, with the kernels that it will stay with."""
        engine = self.engines[graph]
        managed = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if hasattr(self._trt, "DynamicShapesKernelSpecializationStrategy"):  # TensorRT-RTX only
            options = engine.create_runtime_config()
            options.set_execution_context_allocation_strategy(managed)
            if captured:  # otherwise better ones are compiled in the background, and a graph would keep those they replace
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
        """Addresses have no types: a wrong one would be read as garbage."""
        engine = self._info.engines[graph]
        for tensor in (*engine.inputs, *engine.outputs):
            given: ElementType = tensors[tensor.name].element
            if given.name != tensor.dtype:
                raise BundleError(
                    f"{tensor.name} of {graph} is {tensor.dtype}, the runtime has {given.name}; export with this tide-llm again"
                )


@dataclass
class _Context:
    """An execution context, and what it is bound to: of one step, which nothing here keeps alive."""

    context: Any
    bound: dict[str, DeviceTensor] | None = None

    def bind(self, tensors: dict[str, DeviceTensor], inputs: list[str]) -> None:
        for name, tensor in tensors.items():
            if name in inputs and not self.context.set_input_shape(name, tensor.shape):
                raise BundleError(f"{name} cannot have the shape {list(tensor.shape)}; export the bundle again")
            if not self.context.set_tensor_address(name, tensor.pointer):
                raise BundleError(f"the engine has no tensor {name}: the manifest belongs to other files; export again")
        self.bound = tensors


@dataclass(frozen=True)
class _Copy:
    """A cache that an engine writes to other memory than it reads, as TensorRT before 10.15 must; copied back after each run."""

    cache: int
    made: Arena
    count_bytes: int

    @staticmethod
    def of(step: DeviceStep, tensors: dict[str, DeviceTensor], name: str) -> _Copy:
        """Gives the engine memory of its own for the cache output ``name``."""
        tensor = tensors[name]
        count_bytes = math.prod(tensor.shape) * tensor.element.bytes
        made = step.context.buffers.get(**{name: count_bytes})
        tensors[name] = replace(tensor, pointer=made.pointer)
        return _Copy(tensor.pointer, made, count_bytes)


def _apart(engine: EngineInfo) -> list[str]:
    """Cache outputs that are not in the memory of their inputs."""
    return [tensor.name for tensor in engine.outputs if "_cache_out_" in tensor.name and tensor.name not in engine.aliases]


def _load_plugins(target: TargetInfo) -> None:
    """Engines with the router plugin need its library. Raises TargetError when it cannot be loaded."""
    if "router plugin" not in (target.tool or ""):
        return
    try:
        plugin("tensorrt")()
    except TargetError as error:
        raise TargetError(f"the engines hold TIDE's router plugin: {error}") from error
