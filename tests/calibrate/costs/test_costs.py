"""Step costs: a backend whose graphs take known times must be measured as such, and a table must survive its file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from calibrate.cost_model import table
from tide_calibrate.costs.cache_warmth import TURNS, measure_warm_shares
from tide_calibrate.costs.fit import fit_steps
from tide_calibrate.costs.host_overhead import HostTimes
from tide_calibrate.costs.measure import check_depths, measuring_checkpoints, time_graphs, undisturbed, unsplit_ms
from tide_calibrate.costs.padding import fit_ragged, ragged_shapes
from tide_calibrate.costs.step_times import StepTimes
from tide_calibrate.costs.table_file import load_costs, save_costs
from tide_runtime.backends.step_arrays import rounded_tokens
from tide_runtime.bundle.calibration import StepCost
from tide_runtime.bundle.manifest import GenerationInfo, GraphInfo, KVInfo, Manifest, ModelInfo
from tide_runtime.errors import CalibrationError

LAYERS, HIDDEN, LAYER_WEIGHTS = 12, 64, 49152
HOST = HostTimes(full=0.5, exit_evaluation=0.75, verification=0.9)


def manifest(*checkpoints: int) -> Manifest:
    """A model of 12 layers, cut."""
    edges = [0, *checkpoints, LAYERS]
    graphs = [
        GraphInfo(f"segment_{i}", [a, b], (b - a) * LAYER_WEIGHTS, [], []) for i, (a, b) in enumerate(itertools.pairwise(edges))
    ]
    model = ModelInfo("m", "m", None, "M", "m", LAYERS, HIDDEN, 100, 0, 0, "")
    return Manifest(
        schema=1,
        created="",
        tools={},
        model=model,
        dtype="fp32",
        max_seq_len=64,
        checkpoints=list(checkpoints),
        kv=[KVInfo(1, 8, 8)] * LAYERS,
        graphs=[*graphs, GraphInfo("head", None, 0, [], [])],
        targets={},
        generation=GenerationInfo([]),
    )


class FakeBackend:
    """Graphs that take launch + layers * (1 + tokens / 10) ms of a clock of its own; every fifth pass ten times that.

    The head takes 3 ms, a launch of its own included; the last segment ends in one."""

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
    """A fit that mixed up launches and layers would put every checkpoint in the wrong place."""
    cut = manifest(1, 3, 7)
    backend = FakeBackend(cut)
    rounds = time_graphs(backend, cut, [(1,), (4,), (2, 2)], rounds=20, budget_s=1e9, clock=lambda: backend.now)
    times = {shape: undisturbed(of_graphs) for shape, of_graphs in rounds.items()}
    steps = [*fit_steps(cut, 1, {1: times[1,], 4: times[4,]}, HOST), *fit_steps(cut, 2, {2: times[2, 2]}, HOST)]
    for step, (rows, seq) in zip(steps, [(1, 1), (1, 4), (2, 2)], strict=True):
        assert (step.rows, step.seq, step.host_ms) == (rows, seq, 0.5)
        assert (step.ask_extra_ms, step.deep_extra_ms) == pytest.approx((0.25, 0.4))
        assert step.launch_ms == pytest.approx(FakeBackend.LAUNCH)
        assert step.layer_ms == pytest.approx(1 + rows * seq / 10)
        assert step.head_ms == pytest.approx(FakeBackend.HEAD)
        share = 3 * 128 * HIDDEN / LAYER_WEIGHTS  # no exit graph in the bundle: from the weights it would have
        assert step.exit_ms == pytest.approx(step.launch_ms + share * step.layer_ms)
    assert unsplit_ms(steps, LAYERS) == pytest.approx(LAYERS * 1.1 + FakeBackend.HEAD + 0.5)


def test_shapes_take_turns():
    """Timed one after the other, a slow minute of the machine would make one batch size look bad."""
    cut = manifest(1, 3)
    backend = FakeBackend(cut)
    time_graphs(backend, cut, [(1,), (2, 1)], rounds=4, budget_s=1e9, clock=lambda: backend.now)
    assert backend.order == [(1,), (2, 1)] * 4


def test_measuring_stops_when_its_time_is_up():
    """On a model of billions of parameters a pass takes seconds; calibration must not take an hour."""
    cut = manifest(1, 3)
    backend = FakeBackend(cut)
    time_graphs(backend, cut, [(1,)], rounds=100, budget_s=0.0, clock=lambda: backend.now)
    assert len(backend.order) == 3


class SlowToWarm(FakeBackend):
    """As if caches kept nothing of a shape before it has run six times: until then everything takes twice as long."""

    def step(self, first_row: int, counts: Sequence[int], wanted: Sequence[int]) -> SlowToWarmStep:
        return SlowToWarmStep(self, counts)


class SlowToWarmStep(FakeStep):
    def __init__(self, backend: FakeBackend, counts: Sequence[int]) -> None:
        super().__init__(backend, counts)
        self.passes: dict[str, int] = {}

    def run(self, graph: str) -> None:
        begin, self.passes[graph] = self.backend.now, self.passes.get(graph, 0) + 1
        super().run(graph)
        took = (self.backend.now - begin) / 10  # a small model's
        self.backend.now = begin + took * (2 if self.passes[graph] <= 6 else 1)


def test_graphs_are_timed_as_they_run_in_decoding():
    """A plain step gains most from its weights' staying in the caches: timed too early, all drafting looks a tenth too good."""
    cut = manifest(1, 3)
    backend = SlowToWarm(cut)
    times = time_graphs(backend, cut, [(1,)], rounds=4, budget_s=1e9, clock=lambda: backend.now)
    assert undisturbed(times[1,])["segment_0"] == pytest.approx((FakeBackend.LAUNCH + 1.1) / 10)


def test_uneven_rows_are_told_from_even_ones():
    """Batches' first drafts cost a form of their own, and padding: both would be taken from a line between even steps."""
    padding, entry, token, seqs = 0.25, 2.0, 0.5, (1, 2, 4)

    def whole(counts: tuple[int, ...]) -> float:
        rows, even = len(counts), len(set(counts)) == 1
        extra = sum(counts) - rows if even else rounded_tokens(sum(counts), rows * max(counts)) - rows
        padded = rows * max(counts) - rows - extra
        return 10 + (entry + token * (extra + padding * padded) if extra else 0.0)

    shapes = {rows: [(s,) * rows for s in seqs] + ragged_shapes(rows, seqs) for rows in (4, 5, 8)}
    assert [len(own) for own in shapes.values()] == [4, 5, 5]  # twice 4 tokens are rounded up: they tell nothing of padding
    even = [StepCost(rows, s, 0.0, whole((s,) * rows) / LAYERS, 0.0, 0.0, 0.0) for rows in shapes for s in seqs]
    slow = np.array([1.0, 1.3, 1.0, 2.5, 1.1, 1.7])  # the machine, round by round
    times = {counts: whole(counts) * slow for own in shapes.values() for counts in own}
    times[shapes[8][-1]][[1, 4]] *= 20  # and a shape on its own, now and then
    found, between = fit_ragged(even, times)
    assert found == pytest.approx(padding)
    for step, (rows, own) in zip(between, shapes.items(), strict=True):
        tokens = sum(own[3])
        assert tokens == rounded_tokens(rows + 1, 2 * rows) and (step.rows, step.seq) == (rows, tokens / rows)
        assert step.layer_ms * LAYERS == pytest.approx(10 + entry + token * (tokens - rows))
    assert ragged_shapes(8, (1, 2)) == ragged_shapes(2, seqs) == []


def noisy(layer_ms: dict[int, float], seed: int) -> dict[int, dict[str, float]]:
    """Tokens → times of the graphs of a model cut after 1, 3 and 7 layers, some percent off."""
    random, depths = np.random.default_rng(seed), {"segment_0": 1, "segment_1": 2, "segment_2": 4, "segment_3": 5}
    exact = {s: {name: 0.03 + n * ms + (name == "segment_3") * 0.1 for name, n in depths.items()} for s, ms in layer_ms.items()}
    return {s: {name: ms * random.normal(1, 0.03) for name, ms in (*t.items(), ("head", 0.13))} for s, t in exact.items()}


@pytest.mark.parametrize("seed", range(8))
def test_noise_does_not_move_the_costs(seed):
    """Exits are placed by what a launch and a further token cost; fitted size by size, noise would move both."""
    truth = {1: 0.14, 2: 0.14, 4: 0.145, 8: 0.18, 16: 0.22}
    steps = fit_steps(manifest(1, 3, 7), 1, noisy(truth, seed), HOST)
    assert [step.layer_ms for step in steps] == pytest.approx(list(truth.values()), rel=0.06)  # 3% noise in 4 segments
    assert 0.01 < steps[0].launch_ms < 0.05
    assert len({step.launch_ms for step in steps}) == 1
    for part in ("layer_ms", "head_ms", "exit_ms"):
        assert all(a <= b for a, b in itertools.pairwise(getattr(step, part) for step in steps))


def test_noise_never_gives_a_negative_cost():
    """Deep segments measured too slow would make launches of negative length; then nothing could be predicted."""
    (step,) = fit_steps(manifest(2, 8), 1, {1: {"segment_0": 0.5, "segment_1": 4.0, "segment_2": 3.0, "head": 1.0}}, HOST)
    assert step.launch_ms == 0
    assert 0.25 <= step.layer_ms <= 0.75
    with pytest.raises(CalibrationError, match="when the machine is quiet"):
        fit_steps(manifest(2, 8), 1, {1: {"segment_0": 4.0, "segment_1": 1.0, "segment_2": 1.5, "head": 4.5}}, HOST)


class CachingBackend(FakeBackend):
    """A layer takes 1 ms, half of that when fewer than 8 layers ran since it last did."""

    def __init__(self, cut: Manifest) -> None:
        super().__init__(cut)
        self.ran: dict[str, int] = {}
        self.count = 0

    def step(self, first_row: int, counts: Sequence[int], wanted: Sequence[int]) -> CachingStep:
        return CachingStep(self, (1,))


class CachingStep(FakeStep):
    def run(self, graph: str) -> None:
        layers = self.backend.layers.get(graph, 0)
        since = self.backend.count - self.backend.ran.get(graph, -100)
        self.backend.count += layers
        self.backend.ran[graph] = self.backend.count
        self.backend.now += (layers * (0.5 if since < 8 else 1.0) + 0.01) / 1e3


def test_small_prefixes_are_found_warm():
    """Exits that stop early again and again run from the processor's caches; costs that missed that would undersell them."""
    cut = manifest(1, 3, 10)
    backend = CachingBackend(cut)
    shares = measure_warm_shares(backend, cut, rounds=5, clock=lambda: backend.now)
    assert list(shares) == ["1", "3", "10"]
    assert all(len(shares[depth]) == TURNS for depth in shares)
    assert shares["3"] == pytest.approx([1.0, *[0.5] * (TURNS - 1)], abs=0.02)
    assert shares["10"][-1] > 0.9
    times = StepTimes(replace(table(), warm_shares={"3": [1.0, 0.5], "10": [1.0, 0.9]}), 4)
    assert times.warm_shares(3, 12) == pytest.approx([1.0, 0.5])
    assert times.warm_shares(11, 12) == pytest.approx([1.0, 0.95])
    assert times.warm_shares(1, 12) == pytest.approx([1.0, 0.5])


def test_segments_of_one_depth_are_refused():
    """From equal segments a launch cannot be told from a layer; the message names cuts that will do."""
    with pytest.raises(CalibrationError, match="--checkpoints 1,3,6,9"):
        check_depths(manifest(4, 8))
    with pytest.raises(CalibrationError, match="include 1"):
        unsplit_ms([], LAYERS)


@pytest.mark.parametrize("layers", range(3, 40))
def test_measuring_cuts_always_differ_in_depth(layers):
    """Whatever the model's depth, the cuts proposed for measuring must be measurable."""
    edges = [0, *measuring_checkpoints(layers), layers]
    assert len(set(np.diff(edges))) > 1
    assert min(np.diff(edges)) > 0


def test_a_table_survives_its_file(tmp_path):
    """`--costs FILE` must give the very figures that were measured."""
    save_costs(table(), tmp_path / "costs.json")
    assert load_costs(tmp_path / "costs.json") == table()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["steps"][0].update(layer_ms=-1), "layer_ms"),
        (lambda data: data["steps"][0].update(head_ms="fast"), "head_ms"),
        (lambda data: data["steps"][0].pop("exit_ms"), "exit_ms"),
        (lambda data: data.update(unsplit_ms=0), "unsplit_ms"),
        (lambda data: data.update(padding=1.5), "padding"),
        (lambda data: data["steps"][0].update(seq=float("inf")), "seq"),
        (lambda data: data.update(steps=[]), "steps"),
        (lambda data: data.pop("machine"), "machine"),
    ],
)
def test_a_broken_table_is_refused(tmp_path, change, message):
    """A cost that is no time would give a confident and wrong recommendation."""
    path = tmp_path / "costs.json"
    save_costs(table(), path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(CalibrationError, match=message):
        load_costs(path)


def test_a_file_that_is_no_table_is_named(tmp_path):
    """Missing, or not JSON: the message says which file."""
    path = tmp_path / "costs.json"
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_costs(path)
    path.write_text("{")
    with pytest.raises(CalibrationError, match="not JSON"):
        load_costs(path)
    path.write_text("[]")
    with pytest.raises(CalibrationError, match="not a cost table"):
        load_costs(path)


def test_sizes_between_the_measured_ones_lie_on_a_line():
    """Batches of 3 or 20 tokens were not measured; their price must lie on the line through those that were."""
    times = StepTimes(table(), 24)
    assert times.layer[[1, 2, 3, 4, 6, 16, 24]] == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.5, 2.5, 3.3])
    assert times.segments(2, 5)[3] == pytest.approx(2 * 0.5 + 5 * 1.2)
    assert times.segments(2, 5)[0] == 0
    assert times.extra_token == pytest.approx(0.1)


def test_a_table_of_one_size_is_refused():
    """Batches cost next to nothing or a multiple, and one size cannot tell."""
    one = replace(table(), steps=table().steps[:1])
    with pytest.raises(CalibrationError, match=r"measured at \[1\] tokens"):
        StepTimes(one, 8)
