"""Whether torch's functions can be captured by TIDE's `GraphDriver`, in the bodies of WHILE and IF nodes, and compute there what
they compute when the host runs them: what target `torch` rests on, without its backend.

The loop turns three times; a function runs in every turn, and once more, inside an IF, in every second one.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from statistics import median

import torch
from tide_plugins.launch.cuda_driver import CudaDriver
from tide_plugins.plans import LaunchPlan
from tide_runtime.backends.device.cuda_device import CudaDevice
from tide_runtime.backends.device.program import Condition, Enqueue, IfThen, Node, Run, While
from tide_runtime.bundle.architectures import architecture_for
from tide_runtime.device_loop.graph_driver import GraphDriver
from tide_runtime.device_loop.host_driver import HostDriver
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.kit.case import Bench, Figures, KitCase
from benchmarks.gpu.model_shapes import ModelShape
from benchmarks.gpu.pass_costs import Pass, layers
from benchmarks.gpu.small_kernel import compile_cubin

_SOURCE = b"""
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
struct Arguments { int* left; int* flag; unsigned long long handle; int step, reserved; };

// A gate (step 0) lets every second turn in; the end of a turn (step 1) counts it.
extern "C" __global__ void decide(Arguments v) {
  const int left = *v.left -= v.step, value = v.step ? left > 0 : left % 2 == 0;
  *v.flag = value;
  if (v.handle) cudaGraphSetConditional(v.handle, value);
}
"""
_TURNS, _TIMED_TURNS, _HIDDEN, _SLOTS = 3, 200, 2048, 512
_POOLS: list[torch.cuda.MemPool] = []  # of graphs, whose memory nothing else may get while this process lives
Step = Callable[[], None]  # torch's work on tensors that stay where they are


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("left", "flag", "handle")),
        ("step", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


def steps(device: str, hidden: int = _HIDDEN) -> dict[str, Callable[[], tuple[Step, list[Tensor]]]]:
    """Name → maker of a step, and of the tensors that it changes, the result first: each run depends on the one before."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    random = partial(torch.randn, device=device, dtype=dtype)

    def product(rows: int) -> tuple[Step, list[Tensor]]:
        x, weight = random((rows, hidden)), random((hidden, hidden)) * hidden**-0.5
        return lambda: _into(x, F.rms_norm(F.linear(x, weight), (hidden,))), [x]

    def attention() -> tuple[Step, list[Tensor]]:
        heads, group, width = 8, 4, hidden // 32
        x = random((1, heads, group, width))
        keys, values = (random((1, heads, _SLOTS, width)) for _ in range(2))
        mask = (torch.arange(_SLOTS, device=device) <= _SLOTS // 2).expand(group, -1)
        return lambda: _into(x, F.scaled_dot_product_attention(x, keys, values, attn_mask=mask)), [x]

    def dequantised() -> tuple[Step, list[Tensor]]:
        x, scales = random((1, hidden)), random((hidden, hidden // 32, 1)) * hidden**-0.5
        packed = torch.randint(0, 256, (hidden, hidden // 32, 16), device=device, dtype=torch.uint8)

        def step() -> None:
            numbers = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(dtype) - 8
            _into(x, F.rms_norm(F.linear(x, (numbers * scales).flatten(1)), (hidden,)))

        return step, [x]

    def written() -> tuple[Step, list[Tensor]]:
        """By an index that is read on the device, as a cache is."""
        x, at = random((_SLOTS, 64)), torch.zeros(1, device=device, dtype=torch.int64)

        def step() -> None:
            after = (at + 1) % _SLOTS
            x.index_put_((after,), x[at] * 0.5 + x.argmax() % 7)
            at.copy_(after)

        return step, [x, at]

    def layer(kind: str) -> tuple[Step, list[Tensor]]:
        shape = ModelShape("1b", (kind,), 1, hidden, 32 if device == "cuda" else 8, 8, 4 * hidden, 0)
        whole = Pass(layers(shape, kind, 1, 2, device), shape, kind, 1, 4, device)
        return whole.step, [whole.states]

    return {
        "product_1": partial(product, 1),
        "product_8": partial(product, 8),
        "attention": attention,
        "dequantised": dequantised,
        "written": written,
        "layers_fp16": partial(layer, "fp16"),
        "layers_int4": partial(layer, "int4"),
    }


def _into(target: Tensor, value: Tensor) -> None:
    target.copy_(value)


def kit_cases(bench: Bench, argument: str) -> Iterator[KitCase]:
    for name in steps("cpu", 256):
        yield KitCase(name, partial(_captured, name), partial(_stepped, name))


def _stepped(name: str) -> Figures:
    """On the processor, once."""
    if name.startswith("layers"):
        return {}  # half precision is slow there
    step, states = steps("cpu", 256)[name]()
    step()
    assert states[0].isfinite().all()
    return {}


@cache
def _gpu() -> tuple[CudaDevice, CudaDriver, object]:
    device, driver = CudaDevice(), CudaDriver()
    return device, driver, driver.load(compile_cubin(_SOURCE, architecture_for(driver.compute).name), False, "decide")


def _captured(name: str) -> Figures:
    """Node types, why conditional nodes were refused (None: they were not), µs a turn of the graph and of the host.

    Raises AssertionError when the graph's result is not the host's.
    """
    device, _, _ = _gpu()
    step, states = steps("cuda")[name]()
    first = [state.clone() for state in states]
    left = torch.zeros(1, device="cuda", dtype=torch.int32)
    program = _program(_on_stream(step), left)
    host, results = HostDriver(device).compile(program), {}
    for _ in range(2):  # the first run loads kernels and allocates
        results["host"] = _run(host.launch, states, first, left)
    _POOLS.append(torch.cuda.MemPool())
    with torch.cuda.use_mem_pool(_POOLS[-1]):
        graph = GraphDriver(device).compile(program)
    figures: Figures = {"nodes": dict(graph.node_types), "refusal": graph.refusal}
    results["graph"] = _run(graph.launch, states, first, left)
    error = (results["graph"].float() - results["host"].float()).abs().max().item()
    figures |= {"largest_difference": error, "same_bits": bool(torch.equal(results["graph"], results["host"]))}
    assert torch.allclose(results["graph"], results["host"], rtol=1e-3, atol=1e-3, equal_nan=True), figures
    if graph.refusal is None:
        for arm, launch in (("graph", graph.launch), ("host", host.launch)):
            figures[f"{arm}_us_per_turn"] = _us_per_turn(launch, left)
    return figures


def _on_stream(step: Step) -> Enqueue:
    def enqueue(stream: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)), torch.no_grad():
            step()

    return enqueue


def _program(enqueue: Enqueue, left: Tensor) -> tuple[Node, ...]:
    flags = torch.zeros(2, device="cuda", dtype=torch.int32)
    proceed, second = Condition(flags[1].data_ptr(), 1), Condition(flags[0].data_ptr(), 0)
    _, driver, entry = _gpu()

    def decide(condition: Condition, counted: int) -> Enqueue:
        def launch(stream: int) -> None:
            arguments = _Arguments(left.data_ptr(), flags[counted].data_ptr(), condition.handle or 0, counted, 0)
            driver.launch(entry, LaunchPlan((1, 1, 1), (1, 1, 1)), arguments, stream)

        return launch

    inner = IfThen(second, (Run("step", enqueue),))
    return (While(proceed, (Run("gate", decide(second, 0)), inner, Run("step", enqueue), Run("turn", decide(proceed, 1)))),)


def _run(launch: Callable[[int], None], states: list[Tensor], first: list[Tensor], left: Tensor) -> Tensor:
    """What the first of ``states`` is after `_TURNS` turns, when they were ``first`` before."""
    torch.cuda.synchronize()
    for state, before in zip(states, first, strict=True):
        state.copy_(before)
    left.fill_(_TURNS)
    torch.cuda.synchronize()
    launch(_TURNS)
    torch.cuda.synchronize()
    assert left.item() == 0, f"{left.item()} turns are left"
    return states[0].clone()


def _us_per_turn(launch: Callable[[int], None], left: Tensor) -> float:
    taken = []
    for _ in range(5):
        left.fill_(_TIMED_TURNS)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        launch(_TIMED_TURNS)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return 1e6 * median(taken) / _TIMED_TURNS
