"""Decode loops over the stub segments, without ONNX Runtime or TensorRT: WHILE, nested IF, embedding of child graphs, memory
nodes, the token ring, and all kernels of the loop. What the device generates is compared with the host driver and with Python.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from ctypes import Structure
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from tide_plugins.launch.driver import Driver
from tide_plugins.plans import LaunchPlan
from tide_runtime.backends.device.program import Enqueue, Run
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import DevicePlan
from tide_runtime.device_loop.graph_driver import CapturingDevice, GraphDriver
from tide_runtime.device_loop.host_driver import HostDriver
from tide_runtime.device_loop.loop_kernels import LoopKernels
from tide_runtime.device_loop.policy import DrivenDepth, Drivers
from tide_runtime.errors import TargetError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sampler import Sampler
from tide_runtime.scheduling.step import run
from tide_runtime.sequence import TokenSequence

from benchmarks.gpu.small_kernel import compile_cubin
from benchmarks.gpu.stub_model import SLOTS, Wanted, reference
from benchmarks.gpu.stub_segments import SOURCE, SYMBOLS, StubBackend, StubLaunch

_TURNS, _WINDOW = 5, 4  # fewer than in the product, so that short texts need several launches and windows fill
_MLP = ExitInfo(1, "linear", "mlp", exact_threshold=0.5, exit_threshold=0.5)
_PROBABILITY = ExitInfo(1, "identity", "max_probability", exact_threshold=0.5, exit_threshold=0.35)
EXITS: dict[str, tuple[ExitInfo, ...]] = {
    "none": (),
    "mlp": (_MLP,),
    "probability": (_PROBABILITY,),
    "three": (
        replace(_MLP, exit_threshold=0.7),
        replace(_PROBABILITY, checkpoint=2),
        ExitInfo(3, "linear", "mlp+max_probability", exact_threshold=0.5, exit_threshold=0.3, mlp_threshold=0.4),
    ),
}
# form → whether segments run on the device's own stream only, and whether their runs allocate
FORMS = {"conditional": (False, False), "child_graphs": (True, False), "memory_nodes": (True, True)}
_PROMPTS = ((1, 2, 3), (4,), (5, 6, 7, 8, 9, 10, 1), (2, 2), (9, 8, 7))
_BUDGETS = ((21, 3, 40, 1, 30), (99, 5, 99, 99, 9))  # the latter fill their caches


@dataclass(frozen=True)
class GraphCase:
    """``exits``: a key of `EXITS`. ``form``: a key of `FORMS`. ``rows``: sequences at once."""

    exits: str
    form: str
    rows: int

    @property
    def name(self) -> str:
        return f"{self.form}_{self.exits}_b{self.rows}"


def graph_cases() -> Iterator[GraphCase]:
    """The simplest first."""
    for exits in EXITS:
        for form in FORMS:
            for rows in (1, 3):
                yield GraphCase(exits, form, rows)


class StubKernels:
    """The stub kernels on the GPU of ``driver``, for an architecture such as sm_90."""

    def __init__(self, driver: Driver, arch: str) -> None:
        image = compile_cubin(SOURCE, arch)
        self._driver, self._entries = driver, {symbol: driver.load(image, False, symbol) for symbol in SYMBOLS}

    def launch(self, symbol: str, blocks: int, arguments: Structure, stream: int) -> None:
        self._driver.launch(self._entries[symbol], LaunchPlan((blocks, 1, 1), (1, 1, 1)), arguments, stream)


def with_workspaces(launch: StubLaunch) -> StubLaunch:
    """Launches between a stream-ordered allocation and its free, as cuBLAS's are in a capture."""
    from cuda.bindings import driver

    def launched(symbol: str, blocks: int, arguments: Structure, stream: int) -> None:
        error, workspace = driver.cuMemAllocAsync(4096, stream)
        assert error == driver.CUresult.CUDA_SUCCESS, error
        launch(symbol, blocks, arguments, stream)
        (error,) = driver.cuMemFreeAsync(workspace, stream)
        assert error == driver.CUresult.CUDA_SUCCESS, error

    return launched


def run_case(case: GraphCase, device: CapturingDevice, kernels: LoopKernels, launch: StubLaunch) -> dict[str, Any]:
    """Figures of ``case``.

    Args:
        launch: launches a stub kernel; for the form ``memory_nodes``, `with_workspaces`.

    Raises AssertionError when the device generates another text, or was driven in another form.
    """
    captured, host = (_Arm(case, device, kernels, launch, captures) for captures in (True, False))
    wanted = list(_texts(EXITS[case.exits]))
    texts = [(captured.generated(some), host.generated(some), [reference(w, EXITS[case.exits]) for w in some]) for some in wanted]
    execution = captured.drivers.execution
    assert execution is not None, f"the host drove: {captured.drivers.refused}"
    refused = execution.refusal is not None
    assert refused == (case.form == "memory_nodes"), f"conditional nodes were refused: {execution.refusal}"
    different = [place for place, (device_, host_, python) in enumerate(texts) if device_ != python or host_ != python]
    first = texts[different[0]] if different else None
    assert not different, f"batches {different} of {len(texts)} differ; device, host and Python: {first}"
    if case.rows == 1 and not refused:
        assert captured.turns == captured.tokens, f"{captured.turns} turns generated {captured.tokens} tokens: a loop went on"
    return {
        "texts": sum(len(some) for some in wanted),
        "tokens": captured.tokens,
        "node_types": dict(execution.node_types),
        "refusal": execution.refusal,
        "device_ms_per_token": 1e3 * captured.seconds / captured.tokens,
        "host_ms_per_token": 1e3 * host.seconds / host.tokens,
    }


def refused_capture(device: CapturingDevice, synchronize: Enqueue) -> dict[str, str]:
    """The reason why a capture is refused in which ``synchronize`` waits for the stream. Raises AssertionError if it is not."""
    try:
        GraphDriver(device).compile([Run("waits", synchronize, fixed_stream=True)])
    except TargetError as error:
        device.synchronize()  # the stream captures no longer
        return {"refusal": str(error)}
    raise AssertionError("a capture was accepted in which a call waits for the captured stream")


def _texts(exits: tuple[ExitInfo, ...]) -> Iterator[list[Wanted]]:
    """Batches of texts that budgets end, and texts that an EOS token ends in the middle of a launch."""
    for budgets in _BUDGETS:
        yield [Wanted(prompt, new_tokens) for prompt, new_tokens in zip(_PROMPTS, budgets, strict=True)]
    whole = [reference(Wanted(prompt, SLOTS), exits) for prompt in _PROMPTS]
    yield [Wanted(prompt, SLOTS, (text[7],)) for prompt, text in zip(_PROMPTS, whole, strict=True) if len(text) > 7][:1]
    eos = (whole[0][_TURNS + 2],)
    yield [Wanted(prompt, 30, eos) for prompt in _PROMPTS]


class _Arm:
    """Generates with graphs or from the host; ``captures``: graphs, once everything has run."""

    def __init__(
        self, case: GraphCase, device: CapturingDevice, kernels: LoopKernels, launch: StubLaunch, captures: bool
    ) -> None:
        exits = EXITS[case.exits]
        self._backend = StubBackend(device, exits, launch, FORMS[case.form][0])
        inner = ExitDepth(self._backend.manifest, DepthOptions()) if exits else FullDepth()
        plan = inner.device_plan(pads_sequences=True)
        assert isinstance(plan, DevicePlan)
        self.drivers = Drivers(HostDriver(device).compile, GraphDriver(device).compile if captures else None)
        self._policy = DrivenDepth(plan, kernels, _TURNS, self.drivers, _WINDOW)
        self._context, self.tokens, self.seconds = self._backend.context(case.rows), 0, 0.0

    def generated(self, wanted: list[Wanted]) -> list[list[int]]:
        """New tokens of each text, all over the same caches, so that what was captured for one batch serves the next."""
        sequences = [self._sequence(one) for one in wanted]
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # refused nodes are announced; the case checks them
            for _ in run(self._policy, cast(Any, self._context), sequences):
                pass
        self.seconds += time.perf_counter() - begin
        self.tokens += sum(len(sequence.new_tokens) for sequence in sequences)
        return [sequence.new_tokens.tolist() for sequence in sequences]

    @property
    def turns(self) -> int:
        """Turns, and steps of a prompt, each of which runs the first segment once."""
        return self._backend.launches["segment_0"]

    def _sequence(self, wanted: Wanted) -> TokenSequence:
        params = GenerationParams(max_new_tokens=wanted.new_tokens, eos_token_ids=wanted.eos)
        tokens = np.zeros(min(len(wanted.prompt) + wanted.new_tokens, SLOTS + 1), np.int64)
        tokens[: len(wanted.prompt)] = wanted.prompt
        return TokenSequence(
            tokens=tokens,
            num_tokens=len(wanted.prompt),
            prompt_tokens=len(wanted.prompt),
            params=params,
            eos=frozenset(wanted.eos),
            sampler=Sampler(params, self._backend.manifest.model.vocab_size),
        )
