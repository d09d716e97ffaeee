"""Launch plans in Python against the C++ headers that the TensorRT plugin compiles."""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections.abc import Callable
from itertools import product

import pytest
from tide_plugins import plans
from tide_plugins.kernels import CSRC
from tide_plugins.plans import LaunchPlan

_SOURCE = r"""
#include "draft_verify_plan.h"
#include "exit_join_plan.h"
#include "exit_router_plan.h"
#include "exit_score_plan.h"
#include "exit_select_plan.h"
#include "exit_translate_plan.h"
using namespace tide;
static void put(const LaunchPlan& p, int64_t* out) {
  for (int i = 0; i < 3; ++i) { out[i] = p.grid[i]; out[3 + i] = p.block[i]; }
  out[6] = p.shared_bytes; out[7] = p.counters; out[8] = p.workspace_bytes;
}
extern "C" {
void router(int64_t n, int32_t h, int32_t r, int32_t bytes, int32_t sms, int64_t* out) {
  const RouterPlan p = plan_exit_router(n, h, r, bytes, sms);
  put(p.launch, out); out[9] = p.chunk; out[10] = p.tile_rows;
}
void translate(int64_t n, int32_t h, int32_t r, int32_t bytes, int32_t sms, int64_t* out) {
  const TranslatePlan p = plan_exit_translate(n, h, r, bytes, sms);
  put(p.down, out); put(p.up, out + 9); out[18] = p.chunk;
}
void select(int64_t n, int32_t h, int32_t bytes, int32_t in_place, int64_t* out) {
  put(plan_exit_select(n, h, bytes, in_place), out);
}
void loop(int64_t n, int32_t arriving, int64_t* out) { put(plan_loop_block(), out); put(plan_exit_join(n, arriving), out + 9); }
void score(int64_t n, int32_t vocab, int32_t bytes, int64_t* out) { put(plan_exit_score(n, vocab, bytes), out); }
void verify(int64_t n, int32_t vocab, int32_t sampling, int64_t* out) { put(plan_draft_verify(n, vocab, sampling), out); }
}
"""
_ROWS = (0, 1, 7, 8, 9, 64, 127, 128, 129, 512, 4096, 4097, 100_000)
_HIDDEN = (1, 64, 111, 2048, 4096, 4097, 8192, 65536)
_SM_COUNTS = (1, 14, 48, 80, 132, 148)


@pytest.fixture(scope="module")
def planned_by_cpp(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[int]]:
    folder = tmp_path_factory.mktemp("plans")
    (folder / "plans.cpp").write_text(_SOURCE)
    command = ["g++", "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{CSRC}", "plans.cpp", "-o", "plans.so"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "plans.so"))

    def call(name: str, rows: int, *numbers: int) -> list[int]:
        out = (ctypes.c_int64 * 19)()
        getattr(library, name)(ctypes.c_int64(rows), *map(ctypes.c_int32, numbers), out)
        return list(out)

    return call


def _numbers(plan: LaunchPlan) -> list[int]:
    return [*plan.grid, *plan.block, plan.shared_bytes, plan.counters, plan.workspace_bytes]


def _problems(most_width: int) -> list[tuple[int, int, int, int, int]]:
    """(rows, hidden size, width, element bytes, multiprocessors), a fixed sample of the product with all row counts in it."""
    draw = random.Random(0)
    return [
        (rows, hidden, draw.choice((1, 15, 16, 17, 64, 65, most_width)), draw.choice((2, 4)), draw.choice(_SM_COUNTS))
        for rows in _ROWS
        for hidden in _HIDDEN
    ]


def test_router_plans_agree(planned_by_cpp: Callable[..., list[int]]) -> None:
    """Guards against a workspace that is smaller than the kernel's writes."""
    for problem in _problems(plans.MAX_ROUTER_WIDTH):
        plan = plans.plan_exit_router(*problem)
        assert [*_numbers(plan.launch), plan.chunk, plan.tile_rows] == planned_by_cpp("router", *problem)[:11], problem


def test_translate_plans_agree(planned_by_cpp: Callable[..., list[int]]) -> None:
    for problem in _problems(plans.MAX_RANK):
        plan = plans.plan_exit_translate(*problem)
        assert [*_numbers(plan.down), *_numbers(plan.up), plan.chunk] == planned_by_cpp("translate", *problem), problem


def test_select_and_verify_plans_agree(planned_by_cpp: Callable[..., list[int]]) -> None:
    for rows in _ROWS:
        for hidden in _HIDDEN:
            for element_bytes, in_place in ((2, True), (2, False), (4, True), (4, False)):
                problem = (rows, hidden, element_bytes, in_place)
                assert _numbers(plans.plan_exit_select(*problem)) == planned_by_cpp("select", *problem)[:9], problem
            vocab = hidden * 2
            assert _numbers(plans.plan_draft_verify(rows, vocab, True)) == planned_by_cpp("verify", rows, vocab, 1)[:9]
        assert _numbers(plans.plan_draft_verify(rows, 0, False)) == planned_by_cpp("verify", rows, 0, 0)[:9]


def test_loop_plans_agree(planned_by_cpp: Callable[..., list[int]]) -> None:
    for rows in _ROWS:
        for arriving in (1, 8):
            expected = [*_numbers(plans.plan_loop_block()), *_numbers(plans.plan_exit_join(rows, arriving))]
            assert expected == planned_by_cpp("loop", rows, arriving)[:18]
        for vocab, element_bytes in product((1, 4096, 4097, 128_256, 262_144), (2, 4)):
            expected = planned_by_cpp("score", rows, vocab, element_bytes)[:9]
            assert _numbers(plans.plan_exit_score(rows, vocab, element_bytes)) == expected


@pytest.mark.parametrize("rows", [1, 4096])
def test_plans_stay_inside_what_every_gpu_has(rows: int) -> None:
    """Guards against launches beyond 1024 threads or, on sm_75, 64 KiB of shared memory."""
    for problem in _problems(plans.MAX_ROUTER_WIDTH):
        plan = plans.plan_exit_router(rows, *problem[1:]).launch
        assert plan.block[0] <= 1024 and plan.shared_bytes <= 64 * 1024 and plan.grid[2] <= 65535


@pytest.mark.parametrize(("rows", "blocks"), [(129, 40), (256, 64), (384, 96), (512, 128), (1024, 128)])
def test_short_prefills_are_spread_over_the_gpu(rows: int, blocks: int) -> None:
    """Guards against a router that leaves most of the GPU idle, and against one block that adds up everything.

    Bytes of one block on an H100: what it reads of states and `down`, and what the last block of a tile adds up. A multiprocessor
    reads about 100 KB per µs from L2; tiles of 128 rows would take 16 to 64 blocks, of 262 KB and 532 KB.
    """
    hidden_size, width = 4096, 128
    plan = plans.plan_exit_router(rows, hidden_size, width, 2, 132)
    chunks, _, tiles = plan.launch.grid
    assert chunks * tiles == blocks
    assert (plan.tile_rows + width) * plan.chunk * 2 <= 330_000
    assert chunks * plan.tile_rows * (width + 2) * 4 <= 136_000
    assert plan.launch.workspace_bytes / tiles == chunks * plan.tile_rows * (width + 2) * 4


def test_exit_scores_are_read_by_several_multiprocessors() -> None:
    """Guards against one block, at about 0.1 TB/s, that reads the logits of a vocabulary of 128,256."""
    plan = plans.plan_exit_score(1, 128_256, 2)
    assert plan.grid[0] == 16 and 128_256 * 2 / plan.grid[0] < 17_000
