"""Work on several cores: results in order, and an end when somebody wants one."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from functools import partial

import pytest
import torch
from tide_calibrate.parallel import Check, in_parallel


def test_results_come_in_the_order_of_the_jobs() -> None:
    """Traces are put together by position."""

    def job(number: int, check: Check) -> int:
        check()
        return number

    assert list(in_parallel([partial(job, number) for number in range(20)])) == list(range(20))


def test_every_job_has_one_torch_thread_and_the_caller_keeps_his() -> None:
    """More threads than cores fight; and the number of cores must not change a sum's order."""
    before = torch.get_num_threads()
    assert set(in_parallel([lambda check: torch.get_num_threads()] * 4)) == {1}
    assert torch.get_num_threads() == before


def test_whoever_stops_listening_ends_the_jobs() -> None:
    """Ctrl-C must not wait until minutes of training are done. Without the check this would run for ever."""
    begun, ended = threading.Event(), threading.Event()

    def endless(check: Check) -> None:
        begun.set()
        with pytest.raises(CancelledError):
            while True:
                check()
        ended.set()

    results = in_parallel([lambda check: None, endless])
    next(results)
    assert begun.wait(30)
    results.close()
    assert ended.is_set()


def test_a_failure_reaches_the_caller_and_ends_the_other_jobs() -> None:
    def failing(check: Check) -> None:
        raise ValueError("NaN in the loss")

    def endless(check: Check) -> None:
        while True:
            check()

    with pytest.raises(ValueError, match="NaN in the loss"):
        list(in_parallel([failing, endless]))
