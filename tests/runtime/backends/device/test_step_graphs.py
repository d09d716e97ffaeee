"""Steps that the host queues, captured as CUDA graphs on the simulated GPU: the same texts, in fewer launches."""

import warnings
from typing import Any
from weakref import ref

import pytest
from runtime.device_loop.test_decode_loop import MODEL, PROMPTS
from runtime.numpy_backend import tiny_manifest
from runtime.numpy_loop_kernels import NumpyLoopKernels
from runtime.simulated_gpu import SimulatedGpu
from runtime.tiny_device_backend import TinyDeviceBackend
from runtime.tiny_generation import Request, make_row, output
from tide_runtime.backends.device import device_step
from tide_runtime.backends.step_arrays import StepShape
from tide_runtime.depth.exact import ExactDepth
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.device_loop.driver_choice import GraphSupport, capture_steps
from tide_runtime.generation_params import GenerationParams
from tide_runtime.scheduling.step import run

GRAPHS = GraphSupport(lambda: None, lambda: None)
GREEDY = GenerationParams(max_new_tokens=30)
SAMPLED = GenerationParams(max_new_tokens=30, temperature=0.7, seed=5)
PENALISED = GenerationParams(max_new_tokens=30, temperature=0.7, seed=5, repetition_penalty=1.3)


class Steps:
    """Runs `PROMPTS` with a policy whose steps the host queues."""

    def __init__(self, support: GraphSupport = GRAPHS, **backend: Any) -> None:
        self.gpu, self.manifest = SimulatedGpu(), tiny_manifest(MODEL, [1, 3])
        self.backend: Any = TinyDeviceBackend(self.manifest, MODEL, self.gpu, **backend)
        capture_steps(self.backend, support, lambda device: NumpyLoopKernels(self.gpu))  # type: ignore[arg-type,return-value]

    def texts(self, policy: str, params: GenerationParams = GREEDY, capacity: int = 2) -> list[Any]:
        made: Any = FullDepth() if policy == "full" else ExactDepth(self.manifest, DepthOptions(draft="ngram"))
        rows = [make_row(Request(prompt, params, seat), self.manifest) for seat, prompt in enumerate(PROMPTS)]
        context = self.backend.context(capacity)
        for _ in run(made, context, rows):
            pass
        return [output(row) for row in rows]


def expected(params: GenerationParams) -> list[Any]:
    return Steps(GraphSupport(lambda: "no graphs")).texts("full", params)


@pytest.mark.parametrize(
    ("policy", "params", "backend"),
    [
        ("full", GREEDY, {}),
        ("full", PENALISED, {"min_slots": 5}),
        ("exact", GREEDY, {"min_slots": 5}),
        ("exact", SAMPLED, {"fixed_stream": True}),
        ("exact", PENALISED, {"queued_beside": "memory"}),
    ],
)
def test_captured_steps_generate_the_same_texts(policy: str, params: GenerationParams, backend: dict[str, Any]) -> None:
    """Guards against graphs that hold a position, a length, or where the caches were, of the step that was captured."""
    steps = Steps(**backend)
    for capacity in (5, 2, 1):
        assert steps.texts(policy, params, capacity) == expected(params)
    assert steps.gpu.graph_launches > 0
    assert str(steps.backend.step_graphs) == "; steps are CUDA graphs"


def test_a_launch_runs_every_segment() -> None:
    """Guards against a launch for each segment, and launches that are not counted."""
    steps = Steps()
    passes = sum(len(ids) for ids, _ in steps.texts("full", capacity=1))
    assert passes - len(PROMPTS) < steps.gpu.graph_launches <= passes
    assert len(set(steps.backend.launches.values())) == 1


@pytest.mark.parametrize(
    ("beside", "reason"), [("host", "host functions"), ("wait", "a call that a capture does not allow|synchroniz")]
)
def test_what_cannot_be_captured_runs_graph_by_graph(beside: str, reason: str) -> None:
    """Guards against a library that fails every request, or warns at each of them, because its work cannot be captured."""
    steps = Steps(queued_beside=beside)
    with pytest.warns(RuntimeWarning, match=reason) as warned:
        assert steps.texts("exact") == expected(GREEDY)
    assert len(warned) == 1 and not steps.gpu.graph_launches and not steps.gpu.recording
    assert "steps are queued graph by graph: " in str(steps.backend.step_graphs)


def test_machines_without_graphs_say_so() -> None:
    """Guards against captures with a cuda-core that cannot make them."""
    steps = Steps(GraphSupport(lambda: "cuda-core is old"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps.texts("exact")
    assert str(steps.backend.step_graphs).endswith("cuda-core is old") and not steps.gpu.graph_launches


def test_prompts_of_many_lengths_leave_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against decode steps that are captured again because prompts have had a hundred lengths."""
    monkeypatch.setattr(device_step, "_KEPT_STEPS", 4)
    context = Steps().backend.context(1)
    step = context.step(0, [1], [1])
    for tokens in range(17, 30):
        context.step(0, [tokens], [1])
    assert context.step(0, [1], [1]) is step and len(context._steps) == 4


def test_passes_are_captured_before_the_first_request(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against answers that begin with captures, rows that look used, and statistics of launches that serve no request."""
    steps = Steps()
    context = steps.backend.context(6)
    with caplog.at_level("INFO", "tide_runtime"):
        context.capture_passes(longest=7)
    assert steps.backend.step_graphs.captured == 4 * 4  # 1, 2, 4 and 6 sequences of 1, 2, 4 and 8 tokens
    assert "captured 16 steps as CUDA graphs" in caplog.text
    assert not any(context.ends.ends) and not context.caches.rows and not steps.backend.launches
    launches = steps.gpu.graph_launches
    for first, counts in ((0, [1]), (1, [3, 1]), (2, [7, 2, 1, 1])):
        step = context.step(first, counts, counts)
        step.place([0] * len(counts))
        step.run_all(context.every_layer)
    assert steps.gpu.graph_launches == launches + 3 and steps.backend.step_graphs.captured == 16


def test_padding_overruns_no_row() -> None:
    """Guards against padding over what another row has cached, and texts that end before their cache is full."""
    context = Steps().backend.context(4)
    context.ends.reach(1, MODEL.positions - 3)
    assert context.step(0, [3], [3]).shape.seq == 4
    assert context.step(2, [2], [2]).shape == StepShape.padded(4, 2)
    assert context.step(2, [3], [3]).shape == StepShape.of(2, [3], [3])


def test_a_closed_context_frees_its_graphs_and_caches() -> None:
    """Guards against gigabytes that stay on the device until Python looks for cycles."""
    steps = Steps()
    context = steps.backend.context(1)
    for slot in range(3):
        step = context.step(0, [1], [1])
        step.place([slot])
        step.run_all(context.every_layer)
    assert step.captured and steps.gpu.graph_launches
    kept = ref(context)
    context.close()
    del context, step
    assert kept() is None
