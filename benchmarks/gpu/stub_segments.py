"""The stub model's segments, head and exits as CUDA kernels, and a device backend that launches them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from ctypes import Structure, c_int32, c_int64, c_uint64
from typing import Any

from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.device_step import DeviceContext, DeviceStep, DeviceTensor
from tide_runtime.backends.device.element_types import FP32, INT32, ElementType
from tide_runtime.backends.device.program import Enqueue
from tide_runtime.backends.device.step_graphs import StepGraphs
from tide_runtime.backends.step_arrays import StepShape
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import HEAD, exit_graph
from tide_runtime.row_sampling import RowSampling

from benchmarks.gpu.stub_model import LAYERS, STATE_WORDS, VOCAB, stub_manifest

SOURCE = b"""
typedef unsigned long long word;
constexpr int kWords = 4;

struct SegmentArguments {
  const long long* input_ids;  // [rows, seq]; null: read states
  const long long* position_ids;
  const int* write_index;  // [rows]
  const word* states;      // [rows, seq, kWords]
  word* out;
  word* keys[4];  // [rows, slots] of each layer
  word* values[4];
  long long slots;
  int first, count, seq, reserved;
};
struct HeadArguments {
  const word* states;
  const long long* index;  // [n] rows of states; null: all in order
  float* logits;           // [n, vocab]
  long long* token;        // [n]
  int vocab, reserved;
};
struct ExitArguments {
  const word* states;
  float* score;  // [n] or null
  word* out;     // [n, kWords] or null
  int depth, reserved;
};

__device__ word mix(word x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}
__device__ float fraction(word x) { return float(int(x >> 40)) * (1.0f / 16777216.0f); }

// A state that was copied in part is another one.
__device__ word load(const word* row) {
  bool whole = true;
  for (int i = 1; i < kWords; ++i) whole = whole && row[i] == mix(row[0] + word(i));
  return whole ? row[0] : ~row[0];
}
__device__ void store(word* row, word state) {
  row[0] = state;
  for (int i = 1; i < kWords; ++i) row[i] = mix(state + word(i));
}

extern "C" __global__ void stub_segment(SegmentArguments v) {
  for (int i = 0; i < v.seq; ++i) {
    const long long at = (long long)blockIdx.x * v.seq + i, slot = v.write_index[blockIdx.x] + i;
    word state = v.input_ids ? mix(word(31 * v.input_ids[at] + v.position_ids[at])) : load(v.states + at * kWords);
    for (int n = 0; n < v.count; ++n) {
      word *key = v.keys[n] + blockIdx.x * v.slots + slot, *value = v.values[n] + blockIdx.x * v.slots + slot;
      const word before = slot > 0 ? key[-1] + 3 * value[-1] : 0;
      state = mix(state + 0x1000193ull * word(v.first + n + 1) + before);
      *key = state, *value = mix(state);
    }
    store(v.out + at * kWords, state);
  }
}

extern "C" __global__ void stub_head(HeadArguments v) {
  const word state = load(v.states + (v.index ? v.index[blockIdx.x] : blockIdx.x) * kWords);
  float* logits = v.logits + (long long)blockIdx.x * v.vocab;
  int best = 0;
  for (int token = 0; token < v.vocab; ++token) {
    logits[token] = fraction(mix(state + 0x2545F491ull * word(token + 1))) * 4.0f;
    if (logits[token] > logits[best]) best = token;
  }
  v.token[blockIdx.x] = best;
}

extern "C" __global__ void stub_exit(ExitArguments v) {
  const word state = load(v.states + (long long)blockIdx.x * kWords);
  if (v.score) v.score[blockIdx.x] = fraction(mix(state + 0x9E3779B1ull * word(v.depth)));
  if (v.out) store(v.out + (long long)blockIdx.x * kWords, mix(state + 0x85EBCA6Bull * word(v.depth)));
}
"""
SYMBOLS = ("stub_segment", "stub_head", "stub_exit")
StubLaunch = Callable[[str, int, Structure, int], None]  # symbol, blocks of one thread, arguments, stream


class SegmentArguments(Structure):
    _fields_ = (
        *((name, c_uint64) for name in ("input_ids", "position_ids", "write_index", "states", "out")),
        ("keys", c_uint64 * LAYERS),
        ("values", c_uint64 * LAYERS),
        ("slots", c_int64),
        *((name, c_int32) for name in ("first", "count", "seq", "reserved")),
    )


class HeadArguments(Structure):
    _fields_ = (*((name, c_uint64) for name in ("states", "index", "logits", "token")), ("vocab", c_int32), ("reserved", c_int32))


class ExitArguments(Structure):
    _fields_ = (*((name, c_uint64) for name in ("states", "score", "out")), ("depth", c_int32), ("reserved", c_int32))


class StubBackend:
    """A `DeviceBackend` of the stub model with ``exits``. ``fixed_stream``: it launches on the device's stream only."""

    name, pads_sequences, copies_caches = "stub", True, False
    least_slots: int | None = 8  # so that the caches grow
    step_graphs = StepGraphs(None)
    row_sampling: RowSampling | None = None

    def __init__(self, device: Device, exits: tuple[ExitInfo, ...], launch: StubLaunch, fixed_stream: bool = False) -> None:
        self.manifest, self.device, self.fixed_stream, self._launch = stub_manifest(exits), device, fixed_stream, launch
        self.element = self.cache_element = self.logits_element = FP32
        self.input_types: Mapping[str, ElementType] = {"write_index": INT32}
        self.layers = {g.name: g.layers[1] - g.layers[0] if g.layers else 0 for g in self.manifest.graphs}
        self.launches: dict[str, int] = Counter()
        self._ranges = {g.name: range(*g.layers) for g in self.manifest.segments if g.layers}
        self._exits = {exit_graph(info): info for info in exits}

    def context(self, capacity: int) -> DeviceContext:
        return DeviceContext(self, capacity)

    def form(self, graph: str, shape: StepShape) -> str:
        return graph

    def bind(self, form: str, step: DeviceStep, graph: str) -> Enqueue:
        made = self._segment if graph in self._ranges else self._head if graph == HEAD else self._exit
        launches = made(graph, step)

        def enqueue(stream: int) -> None:
            for symbol, blocks, arguments in launches:
                self._launch(symbol, blocks, arguments, self.device.stream if self.fixed_stream else stream)

        return enqueue

    def _segment(self, graph: str, step: DeviceStep) -> list[tuple[str, int, Structure]]:
        layers = self._ranges[graph]
        source = "hidden" if layers.start else "input_ids"
        caches = {kind: [f"{kind}_cache_{n}" for n in layers] for kind in ("key", "value")}
        tensors = _tensors(step, graph, [source, "position_ids", "write_index", "hidden_out", *caches["key"], *caches["value"]])
        batch_size, seq = tensors["position_ids"].shape
        arguments = SegmentArguments(
            position_ids=tensors["position_ids"].pointer,
            write_index=tensors["write_index"].pointer,
            out=tensors["hidden_out"].pointer,
            slots=tensors[caches["key"][0]].shape[2],
            first=layers.start,
            count=len(layers),
            seq=seq,
        )
        setattr(arguments, "states" if layers.start else "input_ids", tensors[source].pointer)
        for kind, names in caches.items():
            for place, name in enumerate(names):
                getattr(arguments, f"{kind}s")[place] = tensors[name].pointer
        launches: list[tuple[str, int, Structure]] = [("stub_segment", batch_size, arguments)]
        if layers.stop == LAYERS:
            launches.append(self._head_launch(step, graph, tensors["hidden_out"].pointer, ["logits_index"]))
        return launches

    def _head(self, graph: str, step: DeviceStep) -> list[tuple[str, int, Structure]]:
        return [self._head_launch(step, graph, _tensors(step, graph, ["hidden"])["hidden"].pointer, [])]

    def _head_launch(self, step: DeviceStep, graph: str, states: int, index: list[str]) -> tuple[str, int, Structure]:
        tensors = _tensors(step, graph, ["logits", "token", *index])
        logits = tensors["logits"]
        arguments = HeadArguments(states=states, logits=logits.pointer, token=tensors["token"].pointer, vocab=VOCAB)
        for name in index:
            arguments.index = tensors[name].pointer
        return "stub_head", logits.shape[0] * logits.shape[1], arguments

    def _exit(self, graph: str, step: DeviceStep) -> list[tuple[str, int, Structure]]:
        info = self._exits[graph]
        tensors = _tensors(step, graph, ["hidden", *info.graph_outputs()])
        found: dict[str, Any] = {"score": tensors.get("score"), "out": tensors.get("hidden_out")}
        given = {name: tensor.pointer for name, tensor in found.items() if tensor is not None}
        rows = tensors["hidden"].shape[0] * tensors["hidden"].shape[1]
        return [("stub_exit", rows, ExitArguments(states=tensors["hidden"].pointer, depth=info.checkpoint, **given))]


def _tensors(step: DeviceStep, graph: str, names: list[str]) -> dict[str, DeviceTensor]:
    tensors = step.tensors(graph, False, names)
    states = (tensor for name, tensor in tensors.items() if name.startswith("hidden"))
    assert all(tensor.shape[-1] * tensor.element.bytes == 8 * STATE_WORDS for tensor in states)
    return tensors
