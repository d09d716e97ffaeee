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


def workers_on(device: torch.device) -> int:
    """Threads that share the work: one on a GPU, which runs kernels in turn whichever thread queues them, and whose memory would
    have to hold the logits of all."""
    return len(os.sched_getaffinity(0)) if device.type != "cuda" else 1


def wait_for(device: torch.device) -> None:
    """Return once the work queued on ``device`` is done, before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_parallel(jobs: Sequence[Callable[[Check], Result]], workers: int | None = None) -> Generator[Result]:
    """Run all jobs in ``workers`` threads, None: one a core, and yield their results in order.

    When a job raises, on Ctrl-C, or when the generator is closed, pending jobs are dropped and running jobs end at their next
    check.
    """
    threads = torch.get_num_threads()
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise CancelledError

    count = max(1, min(len(jobs), workers or len(os.sched_getaffinity(0))))
    pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for future in [pool.submit(job, check) for job in jobs]:
            yield future.result()
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # the workers' setting applies to MKL in every thread of the process
