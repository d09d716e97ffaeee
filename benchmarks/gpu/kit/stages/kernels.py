"""Stage 2: every case of every kernel, with the inputs and checks of the host tests; a fault costs its own case only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from tide_plugins.build.nvrtc import CompilationError
from tide_plugins.conformance import CaseSpec
from tide_plugins.conformance import cases as all_cases
from tide_plugins.launch.kernel_library import KernelLibrary

from benchmarks.gpu.absent_gpu import AbsentGpu
from benchmarks.gpu.gpu import Gpu
from benchmarks.gpu.kernel_cases import prepare_case, run_case
from benchmarks.gpu.kit.case import Bench, Figures, KitCase

_REPEATS, _SECONDS = 20, 0.12


def cases(bench: Bench) -> Iterator[KitCase]:
    """One of each kernel first: what cannot be loaded at all is known after seconds."""
    for spec in _first_of_each(list(all_cases())):
        yield KitCase(
            f"{spec.kernel} {spec.name}",
            _SECONDS,
            lambda spec=spec: _run(spec),  # type: ignore[misc]
            lambda spec=spec: _prepare(spec, bench.compute),  # type: ignore[misc]
            limit=30,
        )


def _first_of_each(specs: Sequence[CaseSpec]) -> list[CaseSpec]:
    """``specs`` in another order."""
    firsts = {spec.kernel: spec for spec in reversed(specs)}
    return [*firsts.values(), *(spec for spec in specs if firsts[spec.kernel] is not spec)]


def _run(spec: CaseSpec) -> Figures:
    gpu, library = _on_gpu()
    try:
        with _compiled_once(spec.kernel):
            run_case(spec.build(), library, gpu, _REPEATS)
    finally:
        gpu.free_all()
    return {}


def _prepare(spec: CaseSpec, compute: int) -> Figures:
    gpu, library = _without_gpu(compute)
    with _compiled_once(spec.kernel):
        prepare_case(spec.build(), library, gpu)
    return {}


_rejected: dict[str, CompilationError] = {}


@contextmanager
def _compiled_once(kernel: str) -> Iterator[None]:
    """Raises what the compiler said of the kernel before, instead of asking it again for each of its cases."""
    if kernel in _rejected:
        raise _rejected[kernel]
    try:
        yield
    except CompilationError as error:
        _rejected[kernel] = error
        raise


@cache
def _on_gpu() -> tuple[Gpu, KernelLibrary]:
    gpu = Gpu()
    return gpu, KernelLibrary(gpu.driver)


@cache
def _without_gpu(compute: int) -> tuple[AbsentGpu, KernelLibrary]:
    gpu = AbsentGpu(compute)
    return gpu, KernelLibrary(gpu)
