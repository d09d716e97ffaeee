"""Step costs: measuring a fake backend with known times, fits under noise, and the file format of the table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import numpy as np
import pytest
from calibrate.cost_model import table
from tide_calibrate.costs.fit import fit_steps
from tide_calibrate.costs.host_overhead import HostTimes
from tide_calibrate.costs.measure import (
    check_depths,
    load_costs,
    measuring_checkpoints,
    save_costs,
    time_graphs,
    undisturbed,
    unsplit_ms,
)
from tide_runtime.bundle.manifest import (
    SCHEMA_VERSION,
    GenerationInfo,
    GraphInfo,
    KVInfo,
    LayerInfo,
    Manifest,
    ModelInfo,
    TensorInfo,
)
from tide_runtime.costs.cost_model import CostModel, StepTable
from tide_runtime.errors import CalibrationError

LAYERS, HIDDEN, LAYER_WEIGHTS = 12, 64, 49152
HOST = HostTimes(full=0.5, depth=0.75)


def manifest(*checkpoints: int) -> Manifest:
    """A manifest of a model of 12 layers, cut at ``checkpoints``."""
    edges = [0, *checkpoints, LAYERS]
    graphs = [
        GraphInfo(f"segment_{i}", [a, b], (b - a) * LAYER_WEIGHTS, [], []) for i, (a, b) in enumerate(itertools.pairwise(edges))
    ]
    model = ModelInfo("m", "m", None, "M", "m", LAYERS, HIDDEN, 100, 0, 0, "")
    return Manifest(
        schema=SCHEMA_VERSION,
        created="",
        tools={},
        model=model,
        dtype="fp32",
        max_seq_len=64,
        checkpoints=list(checkpoints),
        layers=[LayerInfo(KVInfo(1, 8, 8))] * LAYERS,
        graphs=[*graphs, GraphInfo("head", None, 0, [TensorInfo("hidden", "fp32", [HIDDEN])], [])],
        targets={},
        generation=GenerationInfo([]),
    )


class FakeBackend:
    """A backend with a clock of its own: graphs take launch + layers * (1 + tokens / 10) ms, ten times that in every fifth pass.

    The head takes 3 ms including a launch; the last segment includes the head's computation.
    """

    LAUNCH, HEAD = 0.25, 3.0

    def __init__(self, cut: Manifest) -> None:
        self.last = cut.segments[-1].name
        self.layers = {g.name: g.layers[1] - g.layers[0] for g in cut.segments if g.layers} | {"uncut": LAYERS}
        self.every_layer = ["uncut"]
        self.now, self.placed, self.order = 0.0, 0, []

    def context(self, capacity: int) -> FakeBackend:
        self.capacity = capacity
        return self

    def step(self, first_row: int, counts: Sequence[int], wanted: Sequence[int]) -> FakeStep:
        assert first_row + len(counts) <= self.capacity and wanted == counts
        return FakeStep(self, counts)


class FakeStep:
    def __init__(self, backend: FakeBackend, counts: Sequence[int]) -> None:
        self.backend, self.counts = backend, counts

    def place(self, lengths) -> None:
        assert len(lengths) == len(self.counts) and max(lengths) + max(self.counts) <= 64
        self.backend.placed += 1
        self.backend.order.append(self.counts)

    def run(self, graph: str) -> None:
        layers = self.backend.layers.get(graph)
        ms = FakeBackend.HEAD if layers is None else FakeBackend.LAUNCH + layers * (1 + sum(self.counts) / 10)
        ms += FakeBackend.HEAD - FakeBackend.LAUNCH if graph in (self.backend.last, "uncut") else 0
        busy = self.backend.placed % 5 == 0
        self.backend.now += ms * (10 if busy else 1) / 1e3


def test_known_times_are_recovered():
    """A fit that attributes launches to layers, or layers to launches, would misplace every checkpoint."""
    cut = manifest(1, 3, 7)
    backend = FakeBackend(cut)
    rounds = time_graphs(backend, cut, [(1,), (4,), (2, 2)], rounds=20, budget_s=1e9, clock=lambda: backend.now)
    times = {shape: undisturbed(of_graphs) for shape, of_graphs in rounds.items()}
    steps = [*fit_steps(cut, 1, {1: times[1,], 4: times[4,]}, HOST), *fit_steps(cut, 2, {2: times[2, 2]}, HOST)]
    for step, (rows, seq) in zip(steps, [(1, 1), (1, 4), (2, 2)], strict=True):
        assert (step.rows, step.seq, step.host_ms, step.extra_host_ms) == (rows, seq, 0.5, 0.25)
        assert step.launch_ms == pytest.approx(FakeBackend.LAUNCH)
        assert step.layer_ms == pytest.approx(1 + rows * seq / 10)
        assert step.head_ms == pytest.approx(FakeBackend.HEAD)
        share = 3 * 128 * HIDDEN / LAYER_WEIGHTS  # the bundle has no exit graph, so its cost follows from its weights
        assert step.exit_ms == pytest.approx(step.launch_ms + share * step.layer_ms)
    assert unsplit_ms(steps, LAYERS) == pytest.approx(LAYERS * 1.1 + FakeBackend.HEAD + 0.5)


class QueueingBackend(FakeBackend):
    """A backend whose steps only queue their graphs, as on a GPU: they take their time when somebody waits."""

    def __init__(self, cut: Manifest) -> None:
        super().__init__(cut)
        self.device, self.queued = self, 0.0

    def step(self, first_row: int, counts: Sequence[int], wanted: Sequence[int]) -> QueueingStep:
        return QueueingStep(self, counts)

    def synchronize(self) -> None:
        self.now, self.queued = self.now + self.queued, 0.0


class QueueingStep(FakeStep):
    def run(self, graph: str) -> None:
        begin = self.backend.now
        super().run(graph)
        self.backend.queued += self.backend.now - begin
        self.backend.now = begin + 1e-6


def test_graphs_that_are_only_queued_are_waited_for():
    """Times of launches in the place of times of graphs would price the policies of a GPU by its host."""
    cut = manifest(1, 3)
    backend = QueueingBackend(cut)
    times = time_graphs(backend, cut, [(1,)], rounds=4, budget_s=1e9, clock=lambda: backend.now)
    expected = FakeBackend.LAUNCH + (cut.segments[1].layers[1] - cut.segments[1].layers[0]) * 1.1
    assert undisturbed(times[1,])["segment_1"] == pytest.approx(expected, abs=0.01)


def test_shapes_are_timed_interleaved():
    """With one shape after the other, a temporary slowdown would affect a single batch size."""
    cut = manifest(1, 3)
    backend = FakeBackend(cut)
    time_graphs(backend, cut, [(1,), (2, 1)], rounds=4, budget_s=1e9, clock=lambda: backend.now)
    assert backend.order == [(1,), (2, 1)] * 4


def test_measuring_stops_at_the_time_budget():
    """A pass of a model with billions of parameters takes seconds; without a budget, measuring would take an hour."""
    cut = manifest(1, 3)
    backend = FakeBackend(cut)
    time_graphs(backend, cut, [(1,)], rounds=100, budget_s=0.0, clock=lambda: backend.now)
    assert len(backend.order) == 3


class SlowToWarm(FakeBackend):
    """A backend whose graphs take twice as long in the first six passes of a shape, as with cold caches."""

    def step(self, first_row: int, counts: Sequence[int], wanted: Sequence[int]) -> SlowToWarmStep:
        return SlowToWarmStep(self, counts)


class SlowToWarmStep(FakeStep):
    def __init__(self, backend: FakeBackend, counts: Sequence[int]) -> None:
        super().__init__(backend, counts)
        self.passes: dict[str, int] = {}

    def run(self, graph: str) -> None:
        begin, self.passes[graph] = self.backend.now, self.passes.get(graph, 0) + 1
        super().run(graph)
        elapsed = (self.backend.now - begin) / 10  # a small model, for which 8 warm-up passes fit the time limit
        self.backend.now = begin + elapsed * (2 if self.passes[graph] <= 6 else 1)


def test_graphs_are_timed_after_the_caches_are_warm():
    """Full steps gain most from warm caches: timed too early, the speedup of drafting is overestimated by a tenth."""
    cut = manifest(1, 3)
    backend = SlowToWarm(cut)
    times = time_graphs(backend, cut, [(1,)], rounds=4, budget_s=1e9, clock=lambda: backend.now)
    assert undisturbed(times[1,])["segment_0"] == pytest.approx((FakeBackend.LAUNCH + 1.1) / 10)


def noisy(layer_ms: dict[int, float], seed: int) -> dict[int, dict[str, float]]:
    """Tokens → times of the graphs of a model cut after 1, 3 and 7 layers, with 3% noise."""
    random, depths = np.random.default_rng(seed), {"segment_0": 1, "segment_1": 2, "segment_2": 4, "segment_3": 5}
    exact = {s: {name: 0.03 + n * ms + (name == "segment_3") * 0.1 for name, n in depths.items()} for s, ms in layer_ms.items()}
    return {s: {name: ms * random.normal(1, 0.03) for name, ms in (*t.items(), ("head", 0.13))} for s, t in exact.items()}


@pytest.mark.parametrize("seed", range(8))
def test_noise_does_not_move_the_costs(seed):
    """Placement depends on the costs of a launch and of a further token; fitted size by size, both would be noisy."""
    truth = {1: 0.14, 2: 0.14, 4: 0.145, 8: 0.18, 16: 0.22}
    steps = fit_steps(manifest(1, 3, 7), 1, noisy(truth, seed), HOST)
    assert [step.layer_ms for step in steps] == pytest.approx(list(truth.values()), rel=0.06)  # 3% noise in 4 segments
    assert 0.01 < steps[0].launch_ms < 0.05
    assert len({step.launch_ms for step in steps}) == 1
    for part in ("layer_ms", "head_ms", "exit_ms"):
        assert all(a <= b for a, b in itertools.pairwise(getattr(step, part) for step in steps))


def test_noise_never_gives_a_negative_cost():
    """When deep segments are measured too slow, the unconstrained fit gives a negative launch time."""
    (step,) = fit_steps(manifest(2, 8), 1, {1: {"segment_0": 0.5, "segment_1": 4.0, "segment_2": 3.0, "head": 1.0}}, HOST)
    assert step.launch_ms == 0
    assert 0.25 <= step.layer_ms <= 0.75
    with pytest.raises(CalibrationError, match="when the machine is quiet"):
        fit_steps(manifest(2, 8), 1, {1: {"segment_0": 4.0, "segment_1": 1.0, "segment_2": 1.5, "head": 4.5}}, HOST)


def test_segments_of_one_depth_are_refused():
    """Equal segments do not determine launch and layer times; the message must name suitable cuts."""
    with pytest.raises(CalibrationError, match="--checkpoints 1,3,6,9"):
        check_depths(manifest(4, 8))
    with pytest.raises(CalibrationError, match="include 1"):
        unsplit_ms([], LAYERS)


@pytest.mark.parametrize("layers", range(3, 40))
def test_measuring_cuts_always_differ_in_depth(layers):
    """The cuts proposed for measuring must be valid at any depth of the model."""
    edges = [0, *measuring_checkpoints(layers), layers]
    assert len(set(np.diff(edges))) > 1
    assert min(np.diff(edges)) > 0


def test_a_saved_table_is_read_back_equal(tmp_path):
    """`--costs FILE` must use exactly the measured figures."""
    save_costs(table(), tmp_path / "costs.json")
    assert load_costs(tmp_path / "costs.json") == table()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["steps"][0].update(layer_ms=-1), "layer_ms"),
        (lambda data: data["steps"][0].update(head_ms="fast"), "head_ms"),
        (lambda data: data["steps"][0].pop("exit_ms"), "exit_ms"),
        (lambda data: data.update(unsplit_ms=0), "unsplit_ms"),
        (lambda data: data.update(warm_shares={}), "warm_shares"),
        (lambda data: data["steps"][0].update(seq=float("inf")), "seq"),
        (lambda data: data.update(steps=[]), "steps"),
        (lambda data: data.pop("machine"), "machine"),
    ],
)
def test_a_broken_table_is_refused(tmp_path, change, message):
    """An invalid time would lead to a wrong recommendation."""
    path = tmp_path / "costs.json"
    save_costs(table(), path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(CalibrationError, match=message):
        load_costs(path)


def test_errors_for_unreadable_files_name_the_file(tmp_path):
    """The path may be missing, not JSON, or another JSON document."""
    path = tmp_path / "costs.json"
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_costs(path)
    path.write_text("{")
    with pytest.raises(CalibrationError, match="not JSON"):
        load_costs(path)
    path.write_text("[]")
    with pytest.raises(CalibrationError, match="not a cost table"):
        load_costs(path)


def test_unmeasured_sizes_are_interpolated_linearly():
    """The costs of 3 or 24 tokens must lie on the line through the measured sizes."""
    step = StepTable.of(table()).step
    assert [step(1, s).layer_ms for s in (1, 2, 3, 4, 6, 16, 24)] == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.5, 2.5, 3.3])
    model = CostModel(table(), [0, 1, 5, 10])
    assert model.price([model.run(0, 2, tokens=3)]) == pytest.approx(2 * 0.5 + 5 * 1.2)
