"""Run one function in a new process: its threads and its memory are gone when it returns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def run_in_process(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` from a fresh interpreter; its exception is raised here. All of it must pickle."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()
