"""Expected speed of the policies ``exact`` and ``exit`` in closed form: how often tokens stop, times what launches take.

These are predictions. Tokens are taken for independent, and they leave out what a policy learns while it runs. So they choose
which exits are worth a measurement, and stand in for one where the cost table is of another machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import CostTable, ExitInfo, cuts
from tide_runtime.bundle.exits import Exit
from tide_runtime.bundle.manifest import exit_graph
from tide_runtime.costs.batch_speedup import batch_speedup
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.errors import CalibrationError

from tide_calibrate.placement.decisions import decide, exit_depths
from tide_calibrate.traces.trace import SplitTrace

MAX_DRAFTS = 15


def cut_model(exits: Sequence[ExitInfo], num_layers: int, costs: CostTable) -> tuple[CostModel, list[Exit]]:
    """The cost model of a model of ``num_layers`` layers that is cut for ``exits``, and the exits with their boundaries."""
    edges = [0, *cuts(exits, num_layers), num_layers]
    placed = [Exit(info, edges.index(info.checkpoint), exit_graph(info) if info.graph_outputs() else None) for info in exits]
    return CostModel(costs, edges), placed


def exact_speedups(trace: SplitTrace, info: ExitInfo, costs: CostTable) -> NDArray[np.float64]:
    """[D]: tokens/s of policy ``exact`` with drafts from exit ``info`` alone, over the uncut model's, for draft limits 1 … D.

    A cycle drafts while the router is confident (with probability p), up to the limit d, then runs the remaining layers for
    all its tokens. It makes (1 - r^(d + 1)) / (1 - r) tokens, with r the probability that a token is drafted and right (eq. 1 of
    Leviathan et al. 2023). Evaluations: one for each token before the limit. The last draft at the limit is not evaluated.

    Raises CalibrationError unless the table has one sequence at one token and at a larger size, which bounds D.
    """
    limits = np.arange(1, _max_drafts(costs) + 1)
    decisions = decide(trace, info, info.exact_threshold)
    confident = float(decisions.confident.mean())
    drafted_right = float(np.mean(decisions.confident & decisions.agrees))
    model, (early_exit,) = cut_model([info], trace.num_layers, costs)
    with_head, without_head = (model.evaluation(1, 0, early_exit, with_head) for with_head in (True, False))
    evaluation = without_head + float(decisions.runs_head.mean()) * (with_head - without_head)
    prefix = model.run(0, early_exit.boundary)
    finish = np.array([model.finish(early_exit.boundary, tokens=tokens) for tokens in (1, *(limits + 1))])
    reached = confident ** np.arange(len(limits) + 1)  # [k]: probability of at least k drafts
    evaluations = evaluation * np.cumsum(reached[:-1])
    before_limit = np.cumsum(reached[:-1] * (1 - confident) * finish[:-1])
    at_limit = reached[1:] * (prefix + finish[1:])
    tokens = 1 + np.cumsum(drafted_right**limits)
    return costs.unsplit_ms * tokens / (evaluations + before_limit + at_limit)


def _max_drafts(costs: CostTable) -> int:
    """The largest draft limit whose verification pass, the drafts and one token, is within the measured sizes."""
    sizes = sorted(step.seq for step in costs.steps if step.rows == 1)
    if len(sizes) < 2 or sizes[0] != 1:
        raise CalibrationError(
            f"the cost table has one sequence measured at {sizes} tokens; "
            "it needs 1 and at least one larger size: measure again with seqs={1: (1, 2, 4, 8, 16)}"
        )
    return max(1, min(MAX_DRAFTS, int(sizes[-1]) - 1))


def exit_speedup(trace: SplitTrace, exits: Sequence[ExitInfo], costs: CostTable) -> float:
    """Tokens/s of policy ``exit`` over the uncut model's: the price of each depth, weighted by `exit_depths`.

    ``exits``: shallow first; those without an ``exit_threshold`` are passed by.
    """
    taken = [info for info in exits if info.exit_threshold is not None]
    model, placed = cut_model(taken, trace.num_layers, costs)
    return batch_speedup(model, placed, exit_depths(trace, taken), batch_size=1)
