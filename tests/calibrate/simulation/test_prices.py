"""The simulator and the runtime price the same launches: one cost model, held over random tables."""

import numpy as np
import pytest
from calibrate.cost_model import LAYERS, trace
from hypothesis import given
from hypothesis import strategies as st
from tide_calibrate.simulation.exit import simulate_exit, simulate_full
from tide_runtime.bundle.calibration import CostTable, ExitInfo, StepCost
from tide_runtime.bundle.exits import Exit
from tide_runtime.costs.cost_model import CostModel, Graph, Launch
from tide_runtime.depth_tuning import DepthTuning

NO_COOLDOWN = DepthTuning(cooldown=0)
SIZES = (1, 2, 4, 16)
CHECKPOINT = 4
milliseconds = st.floats(0.01, 10)


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    """Costs in any order: also tables whose last sizes take less time than the ones before."""
    steps = [StepCost(1, size, *draw(st.tuples(*[milliseconds] * 6))) for size in SIZES]
    return CostTable("cpu", "random", draw(milliseconds), steps)


@given(tables())
def test_a_full_step_has_one_price(table: CostTable) -> None:
    """Guards against two readers of one table: fed falling costs, they once gave 55.4 ms and -9.4 ms."""
    done = simulate_full(trace({CHECKPOINT: ([1.0], [True])}), table)
    assert done.ms_per_token == pytest.approx(CostModel(table, [0, CHECKPOINT, LAYERS]).full(1, 1, 1))


@given(tables(), st.integers(1, 200))
def test_prices_lie_on_the_measured_line(table: CostTable, tokens: int) -> None:
    """Guards against another interpolation, or a price that falls beyond the largest measured size."""
    model, most = CostModel(table, [0, LAYERS]), SIZES[-1]
    sizes, layer_ms = [step.seq for step in table.steps], [step.layer_ms for step in table.steps]
    price = model.price([Launch(Graph(launches=0, layers=1), 1, tokens)])
    assert price == pytest.approx(np.interp(tokens, sizes, layer_ms)) if tokens <= most else price >= layer_ms[-1]


@given(tables(), st.lists(st.booleans(), min_size=1, max_size=60), st.sampled_from(["identity", "linear", "tail:2"]))
def test_exits_cost_what_the_runtime_takes_them_to_cost(table: CostTable, stops: list[bool], head: str) -> None:
    """Guards against predictions from other prices than those the runtime's backoff uses while it runs."""
    info = ExitInfo(CHECKPOINT, head, "max_probability", 0.5, exit_threshold=0.5)
    text = trace({CHECKPOINT: (np.where(stops, 1.0, 0.0).tolist(), [True] * len(stops))}, head=head)
    done = simulate_exit(text, [info], table, tuning=NO_COOLDOWN)
    edges = sorted({0, CHECKPOINT, LAYERS - info.tail_layers, LAYERS})
    model = CostModel(table, edges)
    early_exit = Exit(info, 1, "exit_4" if info.graph_outputs() else None)
    ms, waiting = 0.0, 0
    for stopped in stops:
        waiting += 1
        ms += model.early_exit_token([early_exit], [1], 0 if stopped else waiting)
        waiting = waiting if stopped else 0
    assert done.ms_per_token * len(stops) == pytest.approx(ms * model.full(1, 1, 1))
