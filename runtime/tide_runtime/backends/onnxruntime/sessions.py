"""ONNX Runtime's sessions of a target: one per graph, loaded at once or when first run.

On the target ``cpu``, ``uncut``, all segments as one graph, runs tokens that take every layer. Graphs that many applications
never use are loaded by the first step that runs them: ``loop`` and, in a bundle without exits, the segments and ``head``.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import onnxruntime as ort

from tide_runtime.backends.graph_contract import check_interface
from tide_runtime.backends.onnxruntime.adapted_graph import AdaptedWeights
from tide_runtime.backends.onnxruntime.packed_weights import PACKED_OUTPUT, PackedWeights
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import HEAD, LOOP, UNCUT, Manifest
from tide_runtime.errors import BundleError, TargetError, TideError

CPU_PROVIDER = "CPUExecutionProvider"
# Read when a session is made: attention multiplies whole matrices, in place of tiles whose softmax is corrected tile by tile.
ATTENTION_SWITCH = "ORT_GQA_DISABLE_FLASH_ATTENTION"
_PROCESSOR = "CPU EP"  # ONNX Runtime's errors name the CPU provider so, where a node may not run there
_NUMPY_DTYPES: dict[str, type[np.generic]] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": np.uint16,  # NumPy has no bf16
    "int8": np.int8,
}
_ORT_DTYPES: dict[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": np.uint16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int8)": np.int8,
    "tensor(bool)": np.bool_,
}


class Sessions:
    """The sessions of one target. Several threads may run them."""

    def __init__(
        self,
        manifest: Manifest,
        layers: dict[str, int],
        load: Callable[[str], ort.InferenceSession],
    ) -> None:
        """Load the sessions that every application uses.

        Args:
            layers: graph name → number of decoder layers it runs.
            load: creates the session of a graph by name.
        """
        self.manifest = manifest
        self.layers = layers
        self._load = load
        segments = [segment.name for segment in manifest.segments]
        self.every_layer = [UNCUT] if UNCUT in layers else segments
        exits = manifest.calibration.exits if manifest.calibration is not None else []
        lazy = {LOOP} if exits else {LOOP, HEAD, *segments} - {*self.every_layer}
        self.sessions = {name: load(name) for name in layers if name not in lazy}
        self.launches: dict[str, int] = Counter()
        self.dtype, self.cache_dtype = _NUMPY_DTYPES[manifest.dtype], _NUMPY_DTYPES[manifest.cache_dtype]
        outputs = {value.name: value for session in self.sessions.values() for value in session.get_outputs()}
        self.logits_dtype = _ORT_DTYPES[outputs["logits"].type]
        self._lock = threading.Lock()

    def session(self, name: str) -> ort.InferenceSession:
        """The session of a graph, loaded on first use. Raises BundleError like `load`."""
        if name not in self.sessions:
            with self._lock:
                if name not in self.sessions:
                    self.sessions[name] = self._load(name)
        return self.sessions[name]


def load_session(
    bundle: Bundle,
    name: str,
    file: str,
    options: ort.SessionOptions,
    providers: Sequence[str | tuple[str, dict[str, str]]],
    shared: PackedWeights | AdaptedWeights | None = None,
) -> ort.InferenceSession:
    """A session of graph ``name`` that runs with the first of ``providers``, on weights that it has in common with others.

    Raises:
        BundleError: ONNX Runtime refuses the graph's ``file``, or it breaks the contract.
        TargetError: ONNX Runtime would run nodes on the processor, which cannot read the provider's memory.
    """
    path = bundle.path(file)
    provider = next(p if isinstance(p, str) else p[0] for p in providers)
    if provider == CPU_PROVIDER:
        os.environ.setdefault(ATTENTION_SWITCH, "1")
    try:
        model = shared.model(path, options) if shared is not None else None
        session = ort.InferenceSession(model or str(path), options, providers=list(providers))
    except TideError:
        raise
    except Exception as error:  # ONNX Runtime raises unrelated exception classes for bad files
        if provider != CPU_PROVIDER and _PROCESSOR in str(error):
            raise TargetError(
                f"ONNX Runtime {ort.__version__} cannot start {provider}, for which it may have logged a reason, or has no "
                f"kernel for a node there, and would run {file} on the processor; check the driver with nvidia-smi, and pip "
                "install 'tide-llm[cuda]'"
            ) from error
        fix = "export the bundle again"
        if any(target.pads_attention for target in bundle.manifest.targets.values()):
            fix = f"the target cpu needs ONNX Runtime 1.32 or newer (pip install -U onnxruntime); with it, {fix}"
        raise BundleError(f"ONNX Runtime {ort.__version__} cannot load {file} ({error}); {fix}") from error
    values = [*session.get_inputs(), *session.get_outputs()]
    foreign = sorted({value.type for value in values} - set(_ORT_DTYPES))
    if foreign:
        raise BundleError(f"{file} has inputs or outputs of type {', '.join(foreign)}; export the bundle again")
    inputs, outputs = ({v.name: v.shape for v in part} for part in (session.get_inputs(), session.get_outputs()))
    outputs.pop(PACKED_OUTPUT, None)
    check_interface(bundle.manifest, name, file, inputs, outputs, host_picks=provider == CPU_PROVIDER)
    return session
