"""Decode loops on a simulated GPU give the same tokens as the host, for changing batches and every driver."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread
from typing import Any
from weakref import ref

import numpy as np
import pytest
from numpy.typing import NDArray
from runtime.numpy_backend import tiny_manifest
from runtime.numpy_loop_kernels import NumpyLoopKernels
from runtime.simulated_gpu import SimulatedGpu
from runtime.tiny_device_backend import FP64, TinyDeviceBackend
from runtime.tiny_generation import Request, make_row, output
from runtime.tiny_transformer import TinyTransformer
from tide_runtime.backends.device.control_flow import Enqueue
from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.device_step import DeviceStep
from tide_runtime.backends.device.element_types import ElementType
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import DevicePlan
from tide_runtime.device_loop.device_policy import DeviceLoopPolicy, Drivers
from tide_runtime.device_loop.graph_driver import GraphDriver
from tide_runtime.device_loop.host_driver import HostDriver
from tide_runtime.device_loop.loop_state import LoopState
from tide_runtime.device_loop.token_ring import NO_TOKEN, TokenRing
from tide_runtime.errors import DeviceMemoryError, NumericsError, TideError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.scheduling.step import run
from tide_runtime.sequence import TokenSequence

MODEL = TinyTransformer(3, (0.5, 0.5, 0.4, 0.6), vocab=11, positions=40)
EXIT = ExitInfo(1, "linear", "mlp", exact_threshold=0.5, exit_threshold=0.45)
BY_PROBABILITY = ExitInfo(1, "identity", "max_probability", exact_threshold=0.5, exit_threshold=0.4)
EXITS: dict[str, tuple[ExitInfo, ...]] = {
    "none": (),
    "mlp": (EXIT,),
    "probability": (BY_PROBABILITY,),
    "both": (ExitInfo(1, "linear", "mlp+max_probability", exact_threshold=0.5, exit_threshold=0.3, mlp_threshold=0.45),),
    "two": (EXIT, replace(EXIT, checkpoint=3, exit_threshold=0.75)),
    "three": (
        replace(EXIT, exit_threshold=0.6),
        replace(BY_PROBABILITY, checkpoint=2, exit_threshold=0.5),
        replace(EXIT, checkpoint=3, exit_threshold=0.75),
    ),
}
SEVERAL = ["two", "three"]
WINDOW, TURNS = 4, 5
PROMPTS = ((1, 2, 3), (4,), (5, 6, 7, 8, 9, 10, 1), (2, 2), (9, 8, 7))
BUDGETS = (12, 3, 30, 1, 17)


def requests(eos: tuple[int, ...] = (), budgets: tuple[int, ...] = BUDGETS) -> list[Request]:
    params = [GenerationParams(max_new_tokens=n, eos_token_ids=eos) for n in budgets]
    return [Request(prompt, given, seat) for seat, (prompt, given) in enumerate(zip(PROMPTS, params, strict=True))]


LONG_TEXTS = requests(budgets=(21,) * 5)


class Driven:
    """Runs requests through `DeviceLoopPolicy` on the simulated GPU. ``compile`` False: the host drives every launch."""

    def __init__(
        self,
        exits: tuple[ExitInfo, ...] = (),
        compile: bool = True,
        fixed: bool = False,
        logits: ElementType = FP64,
        queued_beside: str = "",
        min_slots: int | None = None,
        doubt: int = 0,
    ) -> None:
        self.gpu = SimulatedGpu()
        self.manifest = tiny_manifest(MODEL, sorted({1, 3, *(info.checkpoint for info in exits)}), exits)
        self.backend = TinyDeviceBackend(self.manifest, MODEL, self.gpu, fixed, logits, queued_beside, min_slots)
        self.drivers = Drivers(HostDriver(self.gpu).compile, GraphDriver(self.gpu).compile if compile else None)
        inner = ExitDepth(self.manifest, DepthOptions()) if exits else FullDepth()
        plan = inner.device_plan()
        assert isinstance(plan, DevicePlan)
        self.policy = DeviceLoopPolicy(plan, NumpyLoopKernels(self.gpu, doubt), TURNS, self.drivers, WINDOW)

    def rows(self, wanted: list[Request], capacity: int) -> list[TokenSequence]:
        rows = [make_row(request, self.manifest) for request in wanted]
        for _ in run(self.policy, self.backend.context(capacity), rows):  # type: ignore[arg-type]
            pass
        return rows

    def tokens(self, wanted: list[Request], capacity: int = 3) -> list[tuple[list[int], str | None]]:
        return [output(row) for row in self.rows(wanted, capacity)]


def expected(wanted: list[Request], exits: tuple[ExitInfo, ...]) -> list[tuple[list[int], str | None]]:
    """Reference tokens, each from states computed from scratch; with ``exits``, every token may exit early."""
    return [_continuation(request, exits) for request in wanted]


def _continuation(request: Request, exits: tuple[ExitInfo, ...]) -> tuple[list[int], str | None]:
    text, count = list(request.prompt), len(request.prompt)
    while True:
        states = MODEL.states_of(np.array(text))
        evaluated = exits if len(text) > count else ()
        exit_logits = [_exit_logits(info, states.hidden[info.checkpoint][-1]) for info in evaluated]
        text.append(int(next((logits for logits in exit_logits if logits is not None), states.logits[-1]).argmax()))
        if text[-1] in (request.params.eos_token_ids or ()):
            return text[count:], "eos"
        if len(text) - count == request.params.max_new_tokens:
            return text[count:], "length"
        if len(text) > MODEL.positions:
            return text[count:], "cache_full"


def _exit_logits(info: ExitInfo, state: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Logits of the exit head, or None where the token does not exit."""
    assert info.exit_threshold is not None
    score = float(MODEL.score(info.checkpoint, state))
    logits = MODEL.logits(state if info.head == "identity" else MODEL.translated(info.checkpoint, state))
    if info.router == "mlp":
        return logits if score >= info.exit_threshold else None
    sure = 1 / np.exp(logits - logits.max()).sum() >= info.exit_threshold
    return logits if sure and (info.mlp_threshold is None or score >= info.mlp_threshold) else None


@pytest.mark.parametrize("exits", EXITS.values(), ids=EXITS)
@pytest.mark.parametrize(
    ("fixed", "compile", "capacity"), [(False, False, 3), (True, False, 1), (False, True, 1), (True, True, 3)]
)
def test_every_drive_generates_the_same_tokens(exits: tuple[ExitInfo, ...], fixed: bool, compile: bool, capacity: int) -> None:
    """Guards against output that depends on whether the driver supports conditional graphs."""
    for wanted in (requests(), requests(eos=(4,))):
        driven = Driven(exits, compile, fixed)
        assert driven.tokens(wanted, capacity) == expected(wanted, exits)
    assert driven.gpu.graph_launches == 0 or compile


@pytest.mark.parametrize("exits", EXITS.values(), ids=EXITS)
@pytest.mark.parametrize(("compile", "beside"), [(False, ""), (True, ""), (True, "memory")])
@pytest.mark.filterwarnings("ignore:captured nodes of type")
def test_caches_that_grow_hold_the_same_keys_and_values(exits: tuple[ExitInfo, ...], compile: bool, beside: str) -> None:
    """Guards against keys and values that are lost, or graphs that read where they were, when the slots in use double."""
    for wanted in (requests(), requests(eos=(4,)), requests(budgets=(99, 5, 99, 99, 9))):
        driven = Driven(exits, compile, queued_beside=beside, min_slots=5)
        assert driven.tokens(wanted, 3) == expected(wanted, exits)
    assert bool(driven.gpu.graph_launches) == compile


def test_short_texts_keep_caches_small() -> None:
    """Guards against kernels that read all slots of max_seq_len for texts that fill a tenth of them, and against a service that
    is slow for good after one long text."""
    driven = Driven(min_slots=5)
    context: Any = driven.backend.context(2)
    for new, most in ((3, 10), (30, 40), (3, 10)):
        assert context.caches.slots == 5
        request, seen = Request((1,), GenerationParams(max_new_tokens=new), 0), list[int]()
        for _ in run(driven.policy, context, [make_row(request, driven.manifest)]):
            seen.append(context.caches.slots)
        assert max(seen) == most


def test_requests_that_need_the_host_are_decoded_there() -> None:
    """Guards against silently ignored penalties, biases and log-probabilities."""
    penalty, bias = {"repetition_penalty": 1.3, "temperature": 0.8, "seed": 1}, {"logit_bias": ((3, 9.0),)}
    for given in (GenerationParams(max_new_tokens=9, **one) for one in (penalty, bias, {"logprobs": 2})):  # type: ignore[arg-type]
        wanted = [Request(PROMPTS[0], given, 0)]
        driven = Driven()
        found = driven.rows(wanted, 1)
        reference = [make_row(request, driven.manifest) for request in wanted]
        plain = Driven()
        for _ in run(plain.policy.inner, plain.backend.context(1), reference):  # type: ignore[arg-type]
            pass
        assert driven.gpu.graph_launches == 0
        assert output(found[0]) == output(reference[0])
        assert found[0].logprobs == reference[0].logprobs


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("exits", EXITS.values(), ids=EXITS)
def test_non_finite_logits_raise(exits: tuple[ExitInfo, ...], compile: bool) -> None:
    """Guards against a loop that continues with token -1 or never returns."""
    driven = Driven(exits, compile)
    object.__setattr__(driven.backend, "model", _broken(MODEL))
    with pytest.raises(NumericsError, match="NaN"):
        driven.tokens(requests(), 2)


def _broken(model: TinyTransformer) -> TinyTransformer:
    """The model with NaN at position 6."""
    broken = TinyTransformer(model.seed, model.strengths, model.vocab, model.positions)
    broken.weights["position"][6] = np.nan
    return broken


@pytest.mark.parametrize("fixed", [False, True])
def test_a_failed_capture_is_closed(fixed: bool) -> None:
    """Guards against an open capture, which makes the next use of the stream fail instead of falling back to the host."""
    driven = Driven((EXIT,), fixed=fixed)
    bind = driven.backend.bind

    def bind_uncapturable(form: str, step: DeviceStep, graph: str) -> Enqueue:
        enqueue = bind(form, step, graph)

        def run(stream: int) -> None:
            if graph == "segment_2" and driven.gpu.recording:
                raise RuntimeError("it waits for the stream")
            enqueue(stream)

        return run

    driven.backend.bind = bind_uncapturable  # type: ignore[method-assign]
    wanted = requests(eos=(4,))
    with pytest.warns(RuntimeWarning, match="RuntimeError: it waits for the stream; decoding is driven from the host"):
        assert driven.tokens(wanted) == expected(wanted, (EXIT,))
    assert not driven.gpu.recording and driven.gpu.graph_launches == 0


def test_other_threads_wait_until_a_capture_is_done() -> None:
    """Guards against work of other threads in the graph, where every later launch would repeat it."""
    driven = Driven(fixed=True)
    bind, beside = driven.backend.bind, list[tuple[Thread, bool]]()
    others = driven.backend.context(1).step(0, [1])
    others.place([0])
    others.run("segment_0")

    def bind_watched(form: str, step: DeviceStep, graph: str) -> Enqueue:
        enqueue = bind(form, step, graph)

        def run(stream: int) -> None:
            if driven.gpu.recording and not beside:
                thread = Thread(target=others.run, args=("segment_0",))
                thread.start()
                thread.join(0.2)
                beside.append((thread, thread.is_alive()))
            enqueue(stream)

        return run

    driven.backend.bind = bind_watched  # type: ignore[method-assign]
    wanted = requests()
    assert driven.tokens(wanted) == expected(wanted, ()) and driven.gpu.graph_launches
    [(thread, waited)] = beside
    thread.join(10)
    assert waited and not thread.is_alive()


def test_without_memory_for_a_loop_the_host_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a GPU that never drives again after it was full once."""
    driven, made = Driven(), LoopState.__init__

    def full(state: LoopState, device: Device, rows: int, turns: int, exits: int) -> None:
        if rows > 1:
            raise DeviceMemoryError("the GPU has no 1 MiB left")
        made(state, device, rows, turns, exits)

    monkeypatch.setattr(LoopState, "__init__", full)
    wanted = requests()
    with pytest.warns(RuntimeWarning, match="no 1 MiB left; decoding is driven from the host"):
        assert driven.tokens(wanted) == expected(wanted, ())
    assert driven.tokens(wanted, 1) == expected(wanted, ())
    assert driven.gpu.graph_launches and driven.policy.refused is None


def test_a_loop_is_captured_after_every_graph_has_run() -> None:
    """Guards against a capture of lazy initialization: early launches may not have run the deeper layers."""
    always = replace(EXIT, exit_threshold=0.0)
    driven = Driven((always,))
    [row] = driven.rows([replace(requests()[0], params=GenerationParams(max_new_tokens=3))], 1)
    assert row.finish_reason == "length" and driven.gpu.graph_launches == 0
    ran = driven.backend.launches["segment_2"]
    driven.rows([replace(requests()[0], params=GenerationParams(max_new_tokens=1 + 3 * TURNS))], 1)
    assert driven.gpu.graph_launches and driven.backend.launches["segment_2"] > ran


def test_unused_caches_are_freed() -> None:
    """Guards against loops that keep caches alive until the engine is deleted."""
    driven = Driven((EXIT,))
    context = driven.backend.context(2)
    rows = [make_row(request, driven.manifest) for request in requests()]
    for _ in run(driven.policy, context, rows):  # type: ignore[arg-type]
        pass
    known = ref(context)
    assert context.attached
    context.close()
    del context
    assert known() is None


def test_a_ring_that_was_not_read_in_time_is_refused() -> None:
    """Guards against tokens lost from the middle of a text."""
    ring = TokenRing(SimulatedGpu(), turns=4, batch_size=2)
    ring.entries[0], ring.counts[0] = [7, NO_TOKEN], 1
    assert ring.take() == [[7, NO_TOKEN]] and ring.take() == []
    ring.counts[0] = 6
    with pytest.raises(TideError, match="5 turns were written to a ring of 4"):
        ring.take()


def depths_of(rows: list[TokenSequence]) -> list[int]:
    return [depth for row in rows for depth in row.depth.token_depths]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", ["mlp", "both", "two"])
def test_heads_run_only_for_sequences_that_may_exit(name: str, compile: bool) -> None:
    """Guards against an LM head at every exit whatever its router says: on a model of 1B parameters a fifth of a step each."""
    driven = Driven(EXITS[name], compile)
    depths = depths_of(driven.rows(LONG_TEXTS, 1))
    evaluated = sum(driven.backend.launches[f"exit_{info.checkpoint}"] for info in EXITS[name])
    taken = sum(depths.count(info.checkpoint) for info in EXITS[name])
    assert taken <= driven.backend.launches["head"] < evaluated
    if name != "both":  # the MLP alone decides
        assert driven.backend.launches["head"] <= taken + 1  # one before the capture


def test_a_head_that_no_sequence_needs_does_not_prevent_a_capture() -> None:
    """Guards against loops that stay with the host forever because a graph of theirs has never run."""
    driven = Driven((replace(EXIT, exit_threshold=1.0),))
    wanted = requests(budgets=(21, 21, 21, 21, 21))
    assert driven.tokens(wanted) == expected(wanted, (replace(EXIT, exit_threshold=1.0),))
    assert driven.gpu.graph_launches and driven.backend.launches["head"] <= 3  # one for each size of a batch


@pytest.mark.parametrize("name", SEVERAL)
def test_layers_between_exits_run_only_when_needed(name: str) -> None:
    """Guards against running all layers where the next exit would suffice."""
    driven = Driven(EXITS[name])
    depths = depths_of(driven.rows(LONG_TEXTS, 1))
    launches = [driven.backend.launches[segment.name] for segment in driven.manifest.segments]
    assert launches == sorted(launches, reverse=True) and len(set(launches)) == len(launches)
    for info in EXITS[name]:  # one launch of the layers after it per token that does not exit, few for pending ones
        segment = next(number for number, graph in enumerate(driven.manifest.segments) if graph.layers[0] == info.checkpoint)  # type: ignore[index]
        assert launches[segment] < launches[0] - depths.count(info.checkpoint) // 2
