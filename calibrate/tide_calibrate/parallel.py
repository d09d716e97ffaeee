"""Independent work on several cores, each job with one torch thread: faster than several threads on small matrices,
and the same bytes on machines with any number of cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


def in_parallel(jobs: Sequence[Callable[[], Result]]) -> Iterator[Result]:
    """The jobs' results, in order, as they come. The first job that raises ends it: jobs not yet begun are dropped."""
    threads = torch.get_num_threads()
    workers = max(1, min(len(jobs), len(os.sched_getaffinity(0))))
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        futures = [pool.submit(job) for job in jobs]
        for future in futures:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # the workers' setting reaches MKL in every thread
