"""A device backend over `TinyTransformer`: its graphs run on addresses, rows padded to [B, S], as TensorRT's engines do."""

from collections import Counter

import numpy as np
from runtime.numpy_loop_kernels import FP64, memory
from runtime.simulated_gpu import SimulatedGpu
from runtime.tiny_transformer import HIDDEN, TinyTransformer
from tide_runtime.backends.device.control_flow import Enqueue
from tide_runtime.backends.device.device_step import DeviceContext, DeviceStep, DeviceTensor
from tide_runtime.backends.device.element_types import INT32, ElementType
from tide_runtime.backends.device.step_graphs import StepGraphs
from tide_runtime.backends.step_arrays import StepShape
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import HEAD, Manifest, exit_graph


class TinyDeviceBackend:
    """Runs graphs as ONNX Runtime does (``fixed_stream``) or as TensorRT.

    Args:
        fixed_stream: graphs run on the device's stream only.
        logits: element type of the logits.
        queued_beside: what the library queues around each graph: ``memory``, a workspace (cuBLAS without one from its caller);
            ``host``, a host function that releases the run's buffers; ``wait``, a synchronization of the stream; ``copy``, a copy
            of pageable memory that every run reuses; ``fork``, work on a stream that never joins; or nothing.
        min_slots: of the caches that the graphs are bound to at first; None: all.
    """

    name, no_loop, row_sampling = "tiny", None, None

    def __init__(
        self,
        manifest: Manifest,
        model: TinyTransformer,
        gpu: SimulatedGpu,
        fixed_stream: bool = False,
        logits: ElementType = FP64,
        queued_beside: str = "",
        min_slots: int | None = None,
    ) -> None:
        self._beside, self.min_slots, self._staged = queued_beside, min_slots, 0
        self.manifest, self.model, self.device, self.fixed_stream = manifest, model, gpu, fixed_stream
        self.element, self.cache_element, self.logits_element = FP64, FP64, logits
        self.input_types = {"write_index": INT32}
        self.layers = {g.name: g.layers[1] - g.layers[0] if g.layers else 0 for g in manifest.graphs}
        self.launches: Counter[str] = Counter()
        self.step_graphs = StepGraphs(None)
        self._exits = {exit_graph(e): e for e in (manifest.calibration.exits if manifest.calibration else [])}

    def context(self, capacity: int) -> DeviceContext:
        return DeviceContext(self, capacity)

    def takes(self, rows: int, tokens: int) -> bool:
        return True

    def form(self, graph: str, shape: StepShape) -> str:
        return graph

    def bind(self, form: str, step: DeviceStep, graph: str) -> Enqueue:
        info = next(g for g in self.manifest.graphs if g.name == graph)
        if info.layers is None:
            names = ["hidden", "logits", "token"] if graph == HEAD else ["hidden", *self._exits[graph].graph_outputs()]
            arrays = _arrays(step.tensors(graph, names))
            return self._queued(lambda: self._head(arrays) if graph == HEAD else self._exit(self._exits[graph], arrays))
        names = ["position_ids", "write_index", "hidden" if info.layers[0] else "input_ids"]
        names += [f"{kind}_cache_{layer}" for layer in range(*info.layers) for kind in ("key", "value")]
        last = info.layers[1] == self.manifest.model.num_layers
        names += ["logits_index", "logits", "token"] if last else ["hidden_out"]
        arrays = _arrays(step.tensors(graph, names))
        return self._queued(lambda: self._segment(range(*info.layers), arrays))  # type: ignore[misc]

    def _queued(self, work) -> Enqueue:  # type: ignore[no-untyped-def]
        def enqueue(stream: int) -> None:
            stream = self.device.stream if self.fixed_stream else stream
            if self._beside == "memory":
                workspace = self.device.malloc_async(stream)
                self.device.submit(stream, work)
                self.device.free_async(stream, workspace)
                return
            if self._beside == "copy":
                self._copied(stream, work)
                return
            self.device.submit(stream, work)
            if self._beside == "fork":
                self.device.fork(stream)
            elif self._beside == "host":
                buffers = ["pinned"]
                self.device.launch_host_function(stream, buffers.pop)  # a second call raises IndexError
            elif self._beside == "wait":
                self.device.synchronize_stream(stream)

        return enqueue

    def _copied(self, stream: int, work) -> None:  # type: ignore[no-untyped-def]
        """``work`` after a copy of host memory that the next run will reuse."""
        self._staged += 1
        number, copied = self._staged, list[int]()

        def run() -> None:
            assert copied[-1] == number, "a graph has read what another run left in host memory"
            work()

        self.device.copy_from_host_async(stream, lambda: copied.append(self._staged))
        self.device.submit(stream, run)

    def _segment(self, layers: range, arrays: dict[str, np.ndarray]) -> None:
        positions, written = arrays["position_ids"], arrays["write_index"]
        hidden = self.model.embed(arrays["input_ids"], positions) if layers.start == 0 else arrays["hidden"].copy()
        rows, seq = positions.shape
        slots = written[:, None] + np.arange(seq)
        held = arrays[f"key_cache_{layers.start}"].shape[2]
        assert slots.min() >= 0 and slots.max() < held, f"a cache of {held}: {slots}"
        visible = np.arange(held) <= slots[..., None]
        for layer in layers:
            keys, values = arrays[f"key_cache_{layer}"][:, 0], arrays[f"value_cache_{layer}"][:, 0]
            made = self.model.project(layer, hidden)
            for row in range(rows):
                keys[row, slots[row]], values[row, slots[row]] = made[0][row], made[1][row]
            hidden = self.model.layer(layer, hidden, keys, values, visible)
        if "hidden_out" in arrays:
            arrays["hidden_out"][:] = hidden
        else:
            self._say(hidden.reshape(-1, HIDDEN)[arrays["logits_index"]], arrays)

    def _head(self, arrays: dict[str, np.ndarray]) -> None:
        self._say(arrays["hidden"].reshape(-1, HIDDEN), arrays)

    def _say(self, states: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        logits = self.model.logits(states)
        tokens = np.where(np.isfinite(logits.max(-1)), logits.argmax(-1), -1)
        for name, made in (("logits", logits), ("token", tokens)):
            arrays[name][...] = made.reshape(arrays[name].shape)

    def _exit(self, info: ExitInfo, arrays: dict[str, np.ndarray]) -> None:
        states = arrays["hidden"]
        if info.has_mlp:
            arrays["score"][:] = self.model.score(info.checkpoint, states)
        if info.head != "identity":
            arrays["hidden_out"][:] = self.model.translated(info.checkpoint, states)


def _arrays(tensors: dict[str, DeviceTensor]) -> dict[str, np.ndarray]:
    return {name: memory(t.pointer, t.shape, t.element.host) for name, t in tensors.items()}
