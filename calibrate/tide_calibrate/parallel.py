"""Independent work on several cores, each job with one torch thread: faster than several threads on small matrices,
and the same bytes on machines with any number of cores.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")
Check = Callable[[], None]  # raises CancelledError when nobody waits for the job's result any more


def in_parallel(jobs: Sequence[Callable[[Check], Result]]) -> Generator[Result]:
    """The jobs' results, in order, as they come.

    A job that raises, or Ctrl-C, ends them all: jobs not yet begun are dropped, the others end at their next check.
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
        torch.set_num_threads(threads)  # the workers' setting reaches MKL in every thread
