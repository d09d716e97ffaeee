"""Thread pool that runs each job with one torch thread.

For small matrices this is faster than several torch threads per job, and results do not depend on the number of cores.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")
Check = Callable[[], None]  # raises CancelledError once the job's result is no longer needed


def in_parallel(jobs: Sequence[Callable[[Check], Result]]) -> Generator[Result]:
    """Run all jobs and yield their results in order.

    When a job raises, on Ctrl-C, or when the generator is closed, pending jobs are dropped and running jobs end at their next
    check.
    """
    threads, stopped = torch.get_num_threads(), threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise CancelledError

    workers = max(1, min(len(jobs), len(os.sched_getaffinity(0))))
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for future in [pool.submit(job, check) for job in jobs]:
            yield future.result()
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # the workers' setting applies to MKL in every thread of the process
