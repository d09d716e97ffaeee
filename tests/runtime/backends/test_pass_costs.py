"""What passes through all layers take on this machine: measured by a clock that is made up."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from tide_runtime.backends.pass_costs import SHAPES, measure_pass_costs, pass_table
from tide_runtime.backends.step_arrays import rounded_tokens
from tide_runtime.bundle.calibration import CostTable, StepCost
from tide_runtime.costs.cost_model import CostModel


def ms_of(counts: Sequence[int]) -> float:
    """10 ms and 0.5 ms a token of a matrix product."""
    padded = len(counts) * max(counts)
    tokens = sum(counts) if sum(counts) == padded else rounded_tokens(sum(counts), padded)
    return 1 + 0.05 * tokens


class MadeUpMachine:
    """An execution context whose graph takes `ms_of`, twice as long in its first round."""

    every_layer, has_draft_head = ("model",), False

    def __init__(self) -> None:
        self.now, self.runs, self.closed = 0.0, 0, False
        self.counts: list[int] = []

    def __call__(self, capacity: int) -> Any:
        assert capacity == max(map(len, SHAPES))
        return self

    def step(self, first: int, counts: list[int], wanted: list[int]) -> Any:
        assert len(wanted) == len(counts) and all(0 < w <= c for w, c in zip(wanted, counts, strict=True))
        self.counts, self.input_ids, self.token = counts, np.zeros(sum(counts), np.int64), np.zeros(sum(counts), np.int64)
        return self

    def place(self, cached: list[int]) -> None:
        assert max(cached) + max(self.counts) < 512

    def run_all(self, graphs: Sequence[str]) -> None:
        for graph in graphs:
            self.run(graph)

    def run(self, graph: str) -> None:
        self.now += (2 if self.runs < 2 * len(SHAPES) else 1) * ms_of(self.counts) / 1e3
        self.runs += 1

    def close(self) -> None:
        self.closed = True


def test_passes_are_timed_in_rounds_that_disturbances_spare() -> None:
    """Breaks: a machine that was busy when an engine was loaded would draft by wrong costs ever after."""
    machine = MadeUpMachine()
    table = measure_pass_costs(machine, 512, "cpu", "here", lambda: machine.now)
    model = CostModel(None, [0, 30], passes=table)
    assert machine.closed
    for batch_size, tokens in [(1, 1), (1, 3), (1, 5), (1, 12), (8, 1), (8, 3)]:
        assert model.full(batch_size, batch_size * tokens, tokens) == pytest.approx(ms_of([tokens] * batch_size))
    assert model.packed(8, 8, 16) == pytest.approx(ms_of([3] * 8))
    assert model.full(8, 13, 6) == pytest.approx(ms_of((6, *(1,) * 7)))


def test_slow_machines_are_measured_briefly() -> None:
    """Breaks: the first load of a large model would seem to hang."""
    machine = MadeUpMachine()
    original = machine.run

    def slow(graph: str) -> None:
        original(graph)
        machine.now += 1.0

    machine.run = slow  # type: ignore[method-assign]
    measure_pass_costs(machine, 512, "cpu", "here", lambda: machine.now)
    assert machine.runs == 2 * 3  # each of the first shapes behind single tokens


def test_captured_passes_are_timed_as_launches() -> None:
    """Breaks: a GPU's drafts would be priced by the time that Python takes to queue kernels, or by that of a capture."""
    machine, seen = MadeUpMachine(), Counter[tuple[int, ...]]()

    def run(graph: str) -> None:
        seen[tuple(machine.counts)] += 1
        machine.now += ms_of(machine.counts) / 1e3 if seen[tuple(machine.counts)] > 2 else 9.0

    machine.run = run  # type: ignore[method-assign]
    model = CostModel(None, [0, 30], passes=measure_pass_costs(machine, 512, "torch", "here", lambda: machine.now, captured=True))
    for batch_size, tokens in [(1, 1), (1, 16), (2, 4), (4, 16), (8, 8)]:
        assert model.full(batch_size, batch_size * tokens, tokens) == pytest.approx(ms_of([tokens] * batch_size))


def test_short_caches_are_measured_as_far_as_they_go() -> None:
    """Breaks: bundles that were exported for short texts could not be loaded."""
    machine = MadeUpMachine()
    table = measure_pass_costs(machine, 16, "cpu", "here", lambda: machine.now)
    assert max(step.seq for step in table.steps) == 7
    assert [step.seq for step in measure_pass_costs(machine, 1, "cpu", "here", lambda: machine.now).steps] == [1, 1]


def test_more_tokens_never_take_less() -> None:
    """Breaks: drafts whose verification was measured in a good moment would always be made."""
    table = pass_table({(1,): 10.0, (2,): 9.0, (4,): 12.0}, "cpu", "here")
    assert [step.layer_ms for step in table.steps] == [10.0, 10.0, 12.0]


def test_a_calibrations_figures_are_scaled_to_the_machine() -> None:
    """Breaks: exits would be judged by another machine's times beside passes by this one's."""
    step = StepCost(1, 1, launch_ms=1.0, layer_ms=2.0, head_ms=3.0, exit_ms=1.0, host_ms=1.0)
    calibrated = CostTable("cpu", "there", 10.0, [step])
    here = pass_table({(1,): 5.0, (2,): 6.0}, "cpu", "here")
    model, plain = CostModel(calibrated, [0, 2, 4], passes=here), CostModel(calibrated, [0, 2, 4])
    assert model.full(1, 1, 1) == 5.0 and model.full(1, 2, 2) == 6.0
    assert model.run(0, 1, 1, 1) == plain.run(0, 1, 1, 1) / 2
    assert cast(float, plain.full(1, 1, 1)) > 10
