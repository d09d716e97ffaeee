"""Parallel jobs: order of results, torch threads, and cancellation."""

import threading
from concurrent.futures import CancelledError
from functools import partial

import pytest
import torch
from tide_calibrate.parallel import Check, in_parallel


def test_results_come_in_order_from_jobs_with_one_torch_thread() -> None:
    """Callers combine traces by position, and the number of cores must not change the order of a summation."""

    def job(number: int, check: Check) -> tuple[int, int]:
        check()
        return number, torch.get_num_threads()

    before = torch.get_num_threads()
    assert list(in_parallel([partial(job, number) for number in range(20)])) == [(number, 1) for number in range(20)]
    assert torch.get_num_threads() == before


def test_closing_the_generator_cancels_running_jobs() -> None:
    """Ctrl-C must not wait for minutes of training; without cancellation this test would not terminate."""
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


def test_a_failure_is_raised_and_cancels_the_other_jobs() -> None:
    def failing(check: Check) -> None:
        raise ValueError("NaN in the loss")

    def endless(check: Check) -> None:
        while True:
            check()

    with pytest.raises(ValueError, match="NaN in the loss"):
        list(in_parallel([failing, endless]))
