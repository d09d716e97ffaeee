"""Step costs: measuring a fake backend with known times, fits under noise, and the file format of the table."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

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
from tide_runtime.costs.cost_model import CostModel, StepTable
from tide_runtime.errors import CalibrationError

LAYERS, HIDDEN, LAYER_WEIGHTS = 12, 64, 49152
HOST = HostTimes(full=0.5, depth=0.75)


def manifest(*checkpoints: int) -> Any:
    """What measuring reads of the manifest of a model of 12 layers, cut at ``checkpoints``."""
    edges = itertools.pairwise([0, *checkpoints, LAYERS])
    segments = [
        SimpleNamespace(name=f"segment_{i}", layers=[a, b], parameters=(b - a) * LAYER_WEIGHTS) for i, (a, b) in enumerate(edges)
    ]
    graphs = [*segments, SimpleNamespace(name="head", layers=None)]
    model = SimpleNamespace(num_layers=LAYERS, hidden_size=HIDDEN)
    return SimpleNamespace(segments=segments, graphs=graphs, model=model, max_seq_len=64)


class FakeBackend:
    """A backend with a clock of its own: graphs take launch + layers * (1 + tokens / 10) ms, ten times that in every fifth pass.

    The head takes 3 ms including a launch; the last segment includes the head's computation.

    Args:
        queues: steps only queue their graphs, as on a GPU: they take their time when somebody waits.
        cold_passes: so many first passes of a step take twice as long, as with cold caches.
    """

    LAUNCH, HEAD = 0.25, 3.0

    def __init__(self, cut: Any, queues: bool = False, cold_passes: int = 0) -> None:
        self.last = cut.segments[-1].name
        self.layers = {g.name: g.layers[1] - g.layers[0] for g in cut.segments if g.layers} | {"uncut": LAYERS}
        self.every_layer = ["uncut"]
        self.now, self.queued, self.placed, self.order = 0.0, 0.0, 0, []
        self.queues, self.cold_passes = queues, cold_passes
        if queues:
            self.device = self

    def context(self, capacity: int) -> FakeBackend:
        self.capacity = capacity
        return self

    def step(self, first_row: int, counts: Sequence[int], wanted: Sequence[int]) -> FakeStep:
        assert first_row + len(counts) <= self.capacity and wanted == counts
        return FakeStep(self, counts)

    def synchronize(self) -> None:
        self.now, self.queued = self.now + self.queued, 0.0


class FakeStep:
    def __init__(self, backend: FakeBackend, counts: Sequence[int]) -> None:
        self.backend, self.counts, self.passes = backend, counts, Counter[str]()

    def place(self, lengths) -> None:
        assert len(lengths) == len(self.counts) and max(lengths) + max(self.counts) <= 64
        self.backend.placed += 1
        self.backend.order.append(self.counts)

    def run(self, graph: str) -> None:
        backend, layers = self.backend, self.backend.layers.get(graph)
        ms = FakeBackend.HEAD if layers is None else FakeBackend.LAUNCH + layers * (1 + sum(self.counts) / 10)
        ms += FakeBackend.HEAD - FakeBackend.LAUNCH if graph in (backend.last, "uncut") else 0
        ms *= 10 if backend.placed % 5 == 0 else 1
        self.passes[graph] += 1
        if backend.cold_passes:  # of a small model, for which 8 warm-up passes fit the time limit
            ms *= 0.2 if self.passes[graph] <= backend.cold_passes else 0.1
        if backend.queues:
            backend.queued, ms = backend.queued + ms / 1e3, 1e-3
        backend.now += ms / 1e3


def timed(backend: FakeBackend, cut: Any, shapes: list[tuple[int, ...]], rounds: int, budget_s: float = 1e9):
    """Shape → graph → ms on an idle machine."""
    times = time_graphs(backend, cut, shapes, rounds=rounds, budget_s=budget_s, clock=lambda: backend.now)
    return {shape: undisturbed(of_graphs) for shape, of_graphs in times.items()}


def test_known_times_are_recovered():
    """A fit that attributes launches to layers, or layers to launches, would misplace every checkpoint."""
    cut = manifest(1, 3, 7)
    times = timed(FakeBackend(cut), cut, [(1,), (4,), (2, 2)], rounds=20)
    steps = [*fit_steps(cut, 1, {1: times[1,], 4: times[4,]}, HOST), *fit_steps(cut, 2, {2: times[2, 2]}, HOST)]
    for step, (rows, seq) in zip(steps, [(1, 1), (1, 4), (2, 2)], strict=True):
        assert (step.rows, step.seq, step.host_ms, step.extra_host_ms) == (rows, seq, 0.5, 0.25)
        assert step.launch_ms == pytest.approx(FakeBackend.LAUNCH)
        assert step.layer_ms == pytest.approx(1 + rows * seq / 10)
        assert step.head_ms == pytest.approx(FakeBackend.HEAD)
        share = 3 * 128 * HIDDEN / LAYER_WEIGHTS  # the bundle has no exit graph, so its cost follows from its weights
        assert step.exit_ms == pytest.approx(step.launch_ms + share * step.layer_ms)
    assert unsplit_ms(steps, LAYERS) == pytest.approx(LAYERS * 1.1 + FakeBackend.HEAD + 0.5)


def test_graphs_are_waited_for_and_timed_with_warm_caches():
    """Times of launches would price the policies of a GPU by its host; timed too early, drafting is overestimated by a tenth."""
    cut = manifest(1, 3)
    second = timed(FakeBackend(cut, queues=True), cut, [(1,)], rounds=4)[1,]["segment_1"]
    assert second == pytest.approx(FakeBackend.LAUNCH + 2 * 1.1, abs=0.01)
    first = timed(FakeBackend(cut, cold_passes=6), cut, [(1,)], rounds=4)[1,]["segment_0"]
    assert first == pytest.approx((FakeBackend.LAUNCH + 1.1) / 10)


def test_shapes_are_timed_interleaved_and_within_the_budget():
    """A temporary slowdown would affect a single batch size; and a pass of a large model takes seconds."""
    cut = manifest(1, 3)
    backend, hurried = FakeBackend(cut), FakeBackend(cut)
    timed(backend, cut, [(1,), (2, 1)], rounds=4)
    assert backend.order == [(1,), (2, 1)] * 4
    timed(hurried, cut, [(1,)], rounds=100, budget_s=0.0)
    assert len(hurried.order) == 3


def noisy(layer_ms: dict[int, float], seed: int) -> dict[int, dict[str, float]]:
    """Tokens → times of the graphs of a model cut after 1, 3 and 7 layers, with 3% noise."""
    random, depths = np.random.default_rng(seed), {"segment_0": 1, "segment_1": 2, "segment_2": 4, "segment_3": 5}
    exact = {s: {name: 0.03 + n * ms + (name == "segment_3") * 0.1 for name, n in depths.items()} for s, ms in layer_ms.items()}
    return {s: {name: ms * random.normal(1, 0.03) for name, ms in (*t.items(), ("head", 0.13))} for s, t in exact.items()}


def test_noise_does_not_move_the_costs():
    """Placement depends on the costs of a launch and of a further token; fitted size by size, both would be noisy."""
    truth = {1: 0.14, 2: 0.14, 4: 0.145, 8: 0.18, 16: 0.22}
    for seed in range(8):
        steps = fit_steps(manifest(1, 3, 7), 1, noisy(truth, seed), HOST)
        assert [step.layer_ms for step in steps] == pytest.approx(list(truth.values()), rel=0.06)  # 3% noise in 4 segments
        assert 0.01 < steps[0].launch_ms < 0.05 and len({step.launch_ms for step in steps}) == 1
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
    for layers in range(3, 40):
        depths = np.diff([0, *measuring_checkpoints(layers), layers])
        assert len(set(depths)) > 1 and min(depths) > 0


BROKEN = {
    "layer_ms": lambda data: data["steps"][0].update(layer_ms=-1),
    "head_ms": lambda data: data["steps"][0].update(head_ms="fast"),
    "exit_ms": lambda data: data["steps"][0].pop("exit_ms"),
    "unsplit_ms": lambda data: data.update(unsplit_ms=0),
    "warm_shares": lambda data: data.update(warm_shares={}),
    "seq": lambda data: data["steps"][0].update(seq=float("inf")),
    "steps": lambda data: data.update(steps=[]),
    "machine": lambda data: data.pop("machine"),
}


def test_a_saved_table_is_read_back_equal_and_a_broken_one_refused(tmp_path):
    """`--costs FILE` must use exactly the measured figures; an invalid time would lead to a wrong recommendation."""
    path = tmp_path / "costs.json"
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_costs(path)
    save_costs(table(), path)
    assert load_costs(path) == table()
    saved = path.read_text()
    contents = {words: json.loads(saved) for words in BROKEN}
    for words, change in BROKEN.items():
        change(contents[words])
    texts = {words: json.dumps(data) for words, data in contents.items()} | {"not JSON": "{", "not a cost table": "[]"}
    for words, text in texts.items():
        path.write_text(text)
        with pytest.raises(CalibrationError, match=words):
            load_costs(path)


def test_unmeasured_sizes_are_interpolated_linearly():
    """The costs of 3 or 24 tokens must lie on the line through the measured sizes."""
    step = StepTable.of(table()).step
    assert [step(1, s).layer_ms for s in (1, 2, 3, 4, 6, 16, 24)] == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.5, 2.5, 3.3])
    model = CostModel(table(), [0, 1, 5, 10])
    assert model.run(0, 2, tokens=3) == pytest.approx(2 * 0.5 + 5 * 1.2)
