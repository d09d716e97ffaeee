"""Thread pools of ONNX Runtime: their size, and whether sessions share one.

A chain of sessions with ONNX Runtime's defaults is slow, because the spinning threads of one session's pool compete with those
of the next (3 to 5 times the time of the unsplit graph on two cores). Two remedies:

- ``own`` (default, for embedding): each session has its own pool, whose threads stop spinning when a run ends.
- ``shared``: one pool and one arena for the process, so that no threads have to be woken between segments. ONNX Runtime then
  requires *every* session of the process to use that pool, including those of other libraries
  (``SessionOptions.use_per_session_threads = False``), so it is meant for processes that run only TIDE, such as its commands.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import onnxruntime as ort

from tide_runtime.errors import ParamsError

_LOCK = threading.Lock()
_shared_threads: int | None = None


@dataclass(frozen=True)
class ThreadOptions:
    """``count``: threads per operator; 0: one per core of this process. ``shared``: one pool for the process."""

    count: int = 0
    shared: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 0:
            raise ParamsError(f"threads is {self.count!r}; set it to an integer >= 0 (0: one per core)")

    @property
    def resolved(self) -> int:
        return self.count or len(os.sched_getaffinity(0))


def session_options(threads: ThreadOptions, chained: bool) -> ort.SessionOptions:
    """Session options for ``threads``; ``chained``: other sessions run between two runs of this one."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # A memory pattern is one block for all activations of a session. It saves 3% of a small model's step compared with arena
    # allocations; in a chain of sessions, however, each session's block would be cold in the CPU's caches.
    options.enable_mem_pattern = not chained
    if threads.shared:
        _share_process(threads.resolved)
        options.use_per_session_threads = False
        options.add_session_config_entry("session.use_env_allocators", "1")
    else:
        options.intra_op_num_threads = threads.resolved
        options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def _share_process(count: int) -> None:
    """Create ONNX Runtime's process-wide thread pool and CPU arena once; the pool's size is fixed afterwards."""
    global _shared_threads
    with _LOCK:
        if _shared_threads is None:
            try:
                ort.set_global_thread_pool_sizes(count, 1)
                cpu = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
                ort.create_and_register_allocator(cpu, None)
            except RuntimeError as error:
                raise ParamsError(
                    "the shared thread pool must be made before any other ONNX Runtime session of the process; load the "
                    f"engine first, or use ThreadOptions(shared=False) ({error})"
                ) from error
            _shared_threads = count
        elif _shared_threads != count:
            raise ParamsError(
                f"the shared thread pool has {_shared_threads} threads already, {count} were asked for; use one size per process"
            )
