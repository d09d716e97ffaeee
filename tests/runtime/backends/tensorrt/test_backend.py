"""The TensorRT backend over a recorded API, whose engines compute in NumPy on the bound addresses."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runtime.device_loop.test_decode_loop import MODEL, expected, requests
from runtime.numpy_backend import tiny_manifest
from runtime.numpy_loop_kernels import NumpyLoopKernels, memory
from runtime.simulated_gpu import SimulatedGpu
from runtime.tiny_device_backend import TinyDeviceBackend
from runtime.tiny_generation import make_row, output
from runtime.tiny_transformer import HIDDEN
from tide_runtime.backends.device import element_types
from tide_runtime.backends.device.element_types import ELEMENT_TYPES
from tide_runtime.backends.tensorrt.backend import TensorRtBackend, load_module
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.engine_info import EngineInfo, ProfileInfo, TensorInfo
from tide_runtime.bundle.manifest import Manifest, TargetInfo
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.policy import DevicePlan
from tide_runtime.device_loop.device_policy import DeviceLoopPolicy, Drivers
from tide_runtime.device_loop.driver_choice import choose_driver
from tide_runtime.device_loop.graph_driver import GraphDriver
from tide_runtime.device_loop.host_driver import HostDriver
from tide_runtime.errors import BundleError, ParamsError, TargetError
from tide_runtime.scheduling.step import run

VERSION = "1.7.1.116"
SCRATCH = {"segment_0": 512, "segment_1": 4096, "segment_2": 1024}


class Validity(Enum):
    VALID, SUBOPTIMAL, INVALID = range(3)


@dataclass
class RecordedApi:
    """A stand-in for ``tensorrt_rtx``. ``invalid``, ``slower``: graphs that do not run on this GPU, or run slower.
    ``uncapturable``: graphs that no capture may hold."""

    gpu: SimulatedGpu
    manifest: Manifest
    invalid: tuple[str, ...] = ()
    slower: tuple[str, ...] = ()
    uncapturable: tuple[str, ...] = ()
    contexts: list[RecordedContext] = field(default_factory=list)
    __version__ = VERSION
    EngineValidity = Validity
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user")
    DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager")

    def __post_init__(self) -> None:
        self.Logger = type("Logger", (), {"WARNING": 1, "__init__": lambda self, severity: None})
        self.Runtime = lambda log: self

    def get_engine_validity(self, plan: bytes) -> tuple[Validity, int]:
        bad = Validity.SUBOPTIMAL if plan.decode() in self.slower else Validity.VALID
        return (Validity.INVALID if plan.decode() in self.invalid else bad), 0

    def deserialize_cuda_engine(self, plan: bytes) -> Any:
        name = plan.decode()
        return SimpleNamespace(
            device_memory_size_v2=SCRATCH[name],
            create_execution_context=lambda options: self._context(name, options),
            create_runtime_config=RecordedOptions,
        )

    def _context(self, name: str, options: str | RecordedOptions) -> RecordedContext:
        given = options if isinstance(options, RecordedOptions) else RecordedOptions(options)
        assert given.allocation == "user"
        self.contexts.append(RecordedContext(self, name, given.dynamic_shapes_kernel_specialization_strategy == "eager"))
        return self.contexts[-1]


@dataclass
class RecordedOptions:
    allocation: str = "static"
    dynamic_shapes_kernel_specialization_strategy: str = "lazy"

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.allocation = strategy


@dataclass
class RecordedContext:
    """``eager``: kernels are specialized before the first run. ``steps``: addresses that it was bound to."""

    api: RecordedApi
    graph: str
    eager: bool
    steps: set[int] = field(default_factory=set)
    profile: int = -1
    scratch: tuple[int, int] = (0, 0)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_device_memory(self, pointer: int, size: int) -> None:
        assert pointer % 256 == 0 and size >= SCRATCH[self.graph]
        self.scratch = pointer, size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        if name == "position_ids":
            self.steps.add(address)
        return True

    def is_stream_capturable(self, stream: int) -> bool:
        assert not self.api.gpu.recording and self.addresses, "asked while capturing, or before a run"
        return self.graph not in self.api.uncapturable

    def execute_async_v3(self, stream: int) -> bool:
        info = self.api.manifest.targets["rtx"].engines[self.graph]
        batch, seq = self.shapes["position_ids"]
        assert self.api.manifest.targets["rtx"].profiles[self.profile].takes(batch, seq) and self.scratch[0]
        wanted = self.shapes.get("logits_index", (0,))[0]
        sizes: dict[int | str, int] = {"batch": batch, "seq": seq, "wanted": wanted}
        arrays = {}
        for tensor in (*info.inputs, *info.outputs):
            shape = tuple(sizes.get(dim, dim) for dim in tensor.shape)
            assert tensor.name not in self.shapes or self.shapes[tensor.name] == shape
            arrays[tensor.name] = memory(self.addresses[tensor.name], shape, ELEMENT_TYPES[tensor.dtype].host)  # type: ignore[arg-type]
        for output_name, input_name in info.aliases.items():
            assert self.addresses[output_name] == self.addresses[input_name]
        layers = next(g.layers for g in self.api.manifest.graphs if g.name == self.graph)
        compute = TinyDeviceBackend(self.api.manifest, MODEL, self.api.gpu)
        apart = [name for name in arrays if "_cache_out_" in name and name not in info.aliases]

        def segment() -> None:
            before = {name: arrays[name.replace("_out_", "_")].copy() for name in apart}
            compute._segment(range(*layers), arrays)  # type: ignore[misc]
            for name in apart:  # such engines do not write their cache inputs
                cache = arrays[name.replace("_out_", "_")]
                arrays[name][...], cache[...] = cache, before[name]

        self.api.gpu.submit(stream, segment)
        return True


def engine_info(manifest: Manifest, layers: list[int]) -> EngineInfo:
    def tensor(name: str, dtype: str, *shape: int | str) -> TensorInfo:
        return TensorInfo(name, dtype, list(shape))

    caches = [f"{kind}_cache_{n}" for n in range(*layers) for kind in ("key", "value")]
    shape = ("batch", 1, manifest.max_seq_len, HIDDEN)
    first, last = layers[0] == 0, layers[1] == manifest.model.num_layers
    inputs = [tensor("input_ids", "int64", "batch", "seq")] if first else [tensor("hidden", "fp32", "batch", "seq", HIDDEN)]
    inputs += [tensor("position_ids", "int64", "batch", "seq"), tensor("write_index", "int32", "batch")]
    outputs = [tensor("hidden_out", "fp32", "batch", "seq", HIDDEN)]
    if last:
        inputs.append(tensor("logits_index", "int64", "wanted"))
        outputs = [tensor("logits", "fp32", 1, "wanted", manifest.model.vocab_size), tensor("token", "int64", 1, "wanted")]
    aliases = {name.replace("_cache_", "_cache_out_"): name for name in caches}
    inputs += [tensor(name, "fp32", *shape) for name in caches]
    return EngineInfo(0.0, "fused", len(caches) // 2, inputs, [*outputs, *(tensor(n, "fp32", *shape) for n in aliases)], aliases)


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """Engines of the tiny transformer, which computes in fp64 instead of fp32."""
    monkeypatch.setitem(ELEMENT_TYPES, "fp32", replace(element_types.FP32, host="float64"))
    manifest = tiny_manifest(MODEL, [1, 3])
    engines = {g.name: engine_info(manifest, g.layers) for g in manifest.segments if g.layers}
    for name in engines:
        (tmp_path / name).write_text(name)
    profiles = [ProfileInfo("decode", [1, 1, 4], [1, 1, 2]), ProfileInfo("prefill", [1, 1, 2], [1, 8, 8])]
    info = TargetInfo("tensorrt-rtx", {n: n for n in engines}, None, {}, [89], f"tensorrt-rtx {VERSION}", profiles, engines)
    object.__setattr__(manifest, "targets", {"rtx": info})
    return Bundle(tmp_path, manifest)


def backend(bundle: Bundle, **changes: Any) -> tuple[TensorRtBackend, RecordedApi]:
    gpu = SimulatedGpu()
    api = RecordedApi(gpu, bundle.manifest, **changes)
    return TensorRtBackend(bundle, "rtx", gpu, api), api


@pytest.mark.parametrize("driven", [False, True])
@pytest.mark.parametrize("capacity", [1, 4])
def test_a_changing_batch_generates_the_models_tokens(bundle: Bundle, driven: bool, capacity: int) -> None:
    """Guards against wrong bindings, host-driven and in a captured graph."""
    made, api = backend(bundle)
    policy: Any = FullDepth()
    if driven:
        drivers = Drivers(HostDriver(api.gpu).compile, GraphDriver(api.gpu).compile)
        policy = DeviceLoopPolicy(DevicePlan(policy), NumpyLoopKernels(api.gpu), 3, drivers)
    rows = [make_row(request, bundle.manifest) for request in requests(eos=(4,))]
    for _ in run(policy, made.context(capacity), rows):
        pass
    assert [output(row) for row in rows] == expected(requests(eos=(4,)), ())
    captured = [context for context in api.contexts if context.eager]
    assert bool(captured) == driven
    # A graph records its contexts' bindings, so no other step may use these contexts.
    assert all(len(context.steps) == 1 for context in captured)


def test_an_engine_that_cannot_be_captured_is_named(bundle: Bundle) -> None:
    """Guards against a capture that fails with CUDA's own message; the host goes on driving the loop."""
    made, api = backend(bundle, uncapturable=("segment_1",))
    drivers = Drivers(HostDriver(api.gpu).compile, GraphDriver(api.gpu).compile)
    policy = DeviceLoopPolicy(DevicePlan(FullDepth()), NumpyLoopKernels(api.gpu), 3, drivers)
    rows = [make_row(request, bundle.manifest) for request in requests(eos=(4,))]
    with pytest.warns(RuntimeWarning, match=f"tensorrt-rtx {VERSION} says that its engine of segment_1 cannot be captured"):
        for _ in run(policy, made.context(4), rows):
            pass
    assert [output(row) for row in rows] == expected(requests(eos=(4,)), ())
    assert policy.refused is not None and "segment_1" in policy.refused and not api.gpu.graph_launches


def test_caches_that_engines_copy_are_copied_back(bundle: Bundle) -> None:
    """Guards against missing keys and values: TensorRT 10.4 (V100) updates no cache in place."""
    for engine in bundle.manifest.targets["rtx"].engines.values():
        engine.aliases.clear()
    test_a_changing_batch_generates_the_models_tokens(bundle, False, 4)
    made, _ = backend(bundle)
    assert "copies back" in str(choose_driver(FullDepth(), made))


def test_uneven_sequences_are_padded(bundle: Bundle) -> None:
    """Guards against states of the wrong token: sequences have different numbers of drafts, engines take padded batches."""
    made, _ = backend(bundle)
    context, texts = made.context(2), ([1, 2, 3, 4], [5])
    step = context.step(0, [4, 1], [2, 1])
    step.input_ids[:5] = [*texts[0], *texts[1]]
    step.place([0, 0])
    for segment in bundle.manifest.segments:
        step.run(segment.name)
    states = [MODEL.states_of(np.array(text)) for text in texts]
    wanted = [*states[0].logits[-2:].argmax(-1), states[1].logits[-1].argmax()]
    assert step.token[:3].tolist() == wanted
    first = step.hidden[0]
    assert abs(np.asarray(first[4:5])[0] - states[1].hidden[1][0]).max() < 1e-9


def test_a_context_for_each_profile_and_one_scratch_memory(bundle: Bundle) -> None:
    """Guards against one scratch memory per execution context."""
    made, api = backend(bundle)
    context = made.context(2)
    for counts in ([1], [1], [8], [1, 1], [2]):
        step = context.step(0, counts, [0] * len(counts))
        step.place([0] * len(counts))
        step.run("segment_0")
    assert sorted(context.profile for context in api.contexts) == [0, 1]
    assert {context.scratch for context in api.contexts} == {(made._scratch.pointer, max(SCRATCH.values()))}


def test_a_step_without_a_profile_is_refused(bundle: Bundle) -> None:
    """Guards against TensorRT's own message, about dimensions."""
    made, _ = backend(bundle)
    step = made.context(4).step(0, [8, 8, 8], [])
    step.place([0, 0, 0])
    with pytest.raises(
        ParamsError, match=r"no profile for 3 sequences of 8 tokens \(decode: at most 4 sequences of 2 tokens; prefill"
    ):
        step.run("segment_0")


def test_engines_for_another_gpu_are_refused(bundle: Bundle) -> None:
    """Guards against engines that fail later or run slowly."""
    with pytest.raises(TargetError, match=r"segment_1 is not valid for this GPU.*--target rtx again"):
        backend(bundle, invalid=("segment_1",))


def test_engines_that_are_slower_here_say_so(bundle: Bundle) -> None:
    """Guards against an unnoticed slow engine, which a new export would make faster."""
    with pytest.warns(RuntimeWarning, match=r"segment_1.* of rtx is valid, slower than one built here; tide-inspect says why"):
        backend(bundle, slower=("segment_1",))


def test_engines_of_another_version_are_refused(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against TensorRT's own message, about a magic number."""
    info = bundle.manifest.targets["rtx"]
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", SimpleNamespace(__version__="1.8.0"))  # type: ignore[arg-type]
    with pytest.raises(TargetError, match=rf"built by tensorrt-rtx {VERSION}, here is 1.8.0; pip install .*=={VERSION}"):
        load_module(info)


def test_unsupported_types_are_refused(bundle: Bundle) -> None:
    """Guards against fp16 read as fp32: bindings are untyped addresses."""
    made, _ = backend(bundle)
    engine = bundle.manifest.targets["rtx"].engines["segment_0"]
    engine.outputs[0] = replace(engine.outputs[0], dtype="fp16")
    step = made.context(1).step(0, [1])
    step.place([0])
    with pytest.raises(BundleError, match="hidden_out of segment_0 is fp16, the runtime has fp32"):
        step.run("segment_0")
