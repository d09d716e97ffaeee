"""Processes that this run of the tests started and did not end: they would take the cores and the memory of the next run."""

import os
import uuid
from collections.abc import Iterator

import psutil
import pytest

_MARK = "TIDE_TEST_RUN"  # environment variable, which every process inherits
_GRACE_S = 5


def pytest_configure(config: pytest.Config) -> None:
    """Mark this run's processes, before pytest-xdist starts its own."""
    if not hasattr(config, "workerinput"):
        os.environ[_MARK] = uuid.uuid4().hex


@pytest.hookimpl(trylast=True)  # after pytest-xdist has ended its processes
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End what is left, and fail the run."""
    if hasattr(session.config, "workerinput"):
        return
    _, left = psutil.wait_procs(list(_ours()), timeout=_GRACE_S)
    for process in left:
        try:
            print(f"\nleft running: {process.pid} {' '.join(process.cmdline())[:200]}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _ours() -> Iterator[psutil.Process]:
    """Processes with this run's mark, and their children (Ray's agents overwrite their environment); not multiprocessing's own,
    which end with this process."""
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.environ().get(_MARK) != os.environ[_MARK]:
                continue
            if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                yield from (process, *process.children(recursive=True))
        except psutil.Error:  # ended meanwhile, or another user's
            continue
