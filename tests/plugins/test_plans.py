"""Launch plans: constants that the kernels' sources share, and what every GPU can launch."""

from __future__ import annotations

import random
import re

import pytest
from tide_plugins import plans
from tide_plugins.kernels import CSRC

_ROWS = (0, 1, 7, 8, 9, 64, 129, 4096, 100_000)
_HIDDEN = (1, 64, 111, 2048, 4096, 4097, 8192, 65536)


@pytest.mark.parametrize(
    ("file", "name", "planned"),
    [
        ("exit_router.cuh", "kGroupRows", plans.GROUP_ROWS),
        ("exit_router.cuh", "kGroupThreads", plans.GROUP_THREADS),
        ("exit_router.cuh", "kSliceWidth", plans.SLICE_WIDTH),
        ("loop_threads.h", "kLoopThreads", plans.LOOP_THREADS),
        ("exit_score_params.h", "kScoreThreads", plans.SCORE_THREADS),
        ("choose_token_params.h", "kChooseThreads", plans.CHOOSE_THREADS),
        ("choose_token_params.h", "kMaxChooseBlocks", plans.MAX_CHOOSE_BLOCKS),
        ("choose_token_params.h", "kChooseScratch", plans.CHOOSE_SCRATCH_BYTES),
        ("text_drafts.h", "kTextThreads", plans.TEXT_THREADS),
    ],
)
def test_a_constant_is_the_sources(file: str, name: str, planned: int) -> None:
    """Guards against a grid or a workspace that does not fit the kernel."""
    [value] = re.findall(rf"constexpr \w+ {name} = (\d+);", (CSRC / file).read_text())
    assert int(value) == planned


def test_router_plans_stay_inside_what_every_gpu_has_and_the_kernel_reads() -> None:
    """Guards against launches beyond a grid's limits, and against chunks that one warp does not add."""
    draw = random.Random(0)
    for rows in _ROWS:
        for hidden_size in _HIDDEN:
            width = draw.choice((1, 15, 16, 17, 64, 65, plans.MAX_ROUTER_WIDTH))
            plan = plans.plan_exit_router(rows, hidden_size, width)
            chunks, slices, groups = plan.project.grid
            assert plan.score.grid == (groups, 1, 1) and plan.score.shared_bytes <= 48 * 1024 and groups <= 65535
            assert plan.chunk % plans.CHUNK_STEP == 0 and (chunks - 1) * plan.chunk < hidden_size <= chunks * plan.chunk
            assert chunks <= plans.MAX_CHUNKS and slices * plans.SLICE_WIDTH >= width and groups * plans.GROUP_ROWS >= rows
