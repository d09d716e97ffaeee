"""ONNX Runtime on a GPU: sessions with the CUDA provider, every tensor bound by its device address, driven by the host.

All sessions and copies use one stream, so no synchronization is needed between graphs. The provider's GroupQueryAttention takes
several tokens of one sequence, or one token of each; other steps run sequence by sequence. Nothing is captured: with the
provider's own graphs off, a caller's capture was seen to end the process (onnxruntime pull request 32081).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnxruntime as ort

from tide_runtime.backends.device.control_flow import Enqueue
from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.device_caches import GROWING_SLOTS
from tide_runtime.backends.device.device_step import DeviceStep
from tide_runtime.backends.device.device_target import DeviceTarget, machine_key
from tide_runtime.backends.device.element_types import BF16, ELEMENT_TYPES, FP16, FP32, ElementType
from tide_runtime.backends.device.step_graphs import StepGraphs
from tide_runtime.backends.graph_contract import decoder_layers
from tide_runtime.backends.onnxruntime.cuda_libraries import INSTALL_PROVIDER, missing_cuda_libraries
from tide_runtime.backends.onnxruntime.sessions import Sessions, load_session
from tide_runtime.backends.onnxruntime.threads import ThreadOptions, session_options
from tide_runtime.backends.step_arrays import StepShape
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.errors import BundleError, TargetError

PROVIDER = "CUDAExecutionProvider"
# A node without a CUDA kernel would run on the processor, which cannot read device addresses.
_NO_FALLBACK = ("session.disable_cpu_ep_fallback", "1")
_UNCAPTURED = "steps of ONNX Runtime's sessions are not captured"
Provider = tuple[str, dict[str, str]]


class OnnxRuntimeCudaBackend(DeviceTarget, Sessions):
    """The ``cuda`` target on ``device``. Several threads may run steps, each with its own ``ExecutionContext``."""

    name = "onnxruntime-cuda"
    fixed_stream = True
    no_loop = _UNCAPTURED
    step_graphs = StepGraphs(None, _UNCAPTURED)
    min_slots: int | None = GROWING_SLOTS

    def __init__(
        self,
        manifest: Manifest,
        layers: dict[str, int],
        load: Callable[[str], ort.InferenceSession],
        device: Device,
    ) -> None:
        self.device = device
        self.element = ELEMENT_TYPES[manifest.dtype]
        self.input_types: Mapping[str, ElementType] = {}
        super().__init__(manifest, layers, load)
        self.logits_element = next(e for e in (FP32, FP16, BF16) if e.host is self.logits_dtype)
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    @classmethod
    def load(
        cls, bundle: Bundle, target: str, threads: ThreadOptions, device: Device, provider: Provider
    ) -> OnnxRuntimeCudaBackend:
        """Load the graphs of ``target`` for ``device`` and ONNX Runtime's ``provider`` for it (`cuda_provider`).

        Raises BundleError when ONNX Runtime refuses a graph, as it does where it has no CUDA kernel for a node, or a graph breaks
        the contract; DeviceMemoryError when memory is short.
        """
        manifest = bundle.manifest
        files = bundle.manifest.targets[target].graphs

        def load(name: str) -> ort.InferenceSession:
            options = session_options(threads, chained=True)
            if provider[0] == PROVIDER:
                options.add_session_config_entry(*_NO_FALLBACK)
            return load_session(bundle, name, files[name], options, [provider])

        backend = cls(manifest, decoder_layers(manifest, files), load, device)
        backend.target = target
        backend.machine_key = machine_key(bundle, target, device.name, f"onnxruntime {ort.__version__}")
        return backend

    def takes(self, rows: int, tokens: int) -> bool:
        return rows == 1 or tokens == 1

    def form(self, graph: str, shape: StepShape) -> str:
        return graph

    def bind(self, form: str, step: DeviceStep, graph: str) -> Enqueue:
        session = self.session(form)
        binding = session.io_binding()
        inputs, outputs = ([v.name for v in part] for part in (session.get_inputs(), session.get_outputs()))
        for name, tensor in step.tensors(graph, [*inputs, *outputs]).items():
            kind, ordinal = ("cpu", 0) if tensor.on_host else (self.device.kind, self.device.ordinal)
            bind = binding.bind_input if name in inputs else binding.bind_output
            bind(name, kind, ordinal, tensor.element.onnx, tensor.shape, tensor.pointer)

        def run(stream: int) -> None:
            try:
                session.run_with_iobinding(binding, self._options)
            except Exception as error:  # ONNX Runtime raises RuntimeError and unrelated classes
                raise BundleError(
                    f"ONNX Runtime {ort.__version__} cannot run {graph} ({error}); export the bundle again"
                ) from error

        return run


def cuda_provider(device: Device) -> Provider:
    """Name and options of the CUDA provider on the device's stream.

    Raises TargetError when this ONNX Runtime lacks it, or a library that it needs cannot be loaded.
    """
    if PROVIDER not in ort.get_available_providers():  # those that it was compiled with
        raise TargetError(f"ONNX Runtime {ort.__version__} was installed without {PROVIDER}: {INSTALL_PROVIDER}")
    if missing := missing_cuda_libraries():
        raise TargetError(f"{PROVIDER} cannot be loaded ({'; '.join(missing)}); pip install 'tide-llm[cuda]'")
    return PROVIDER, {
        "device_id": str(device.ordinal),
        "user_compute_stream": str(device.stream),
        "arena_extend_strategy": "kSameAsRequested",  # doubling would reserve memory that the KV caches need
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",  # compute in full fp32, as the eager model does
    }
