"""The benchmark of attention forms, from which the runtime's choice of a form derives."""

from __future__ import annotations

from collections.abc import Callable

from tide_runtime import Engine
from tide_runtime.bundle.manifest import UNCUT, forms_of

from benchmarks.attention_forms import FORMS, measure


def test_the_benchmark_times_the_forms_it_names(load: Callable[..., Engine]) -> None:
    """A form that was not forced would be another one's time under its name."""
    with load() as engine:
        times = measure(engine.backend, slots=48, rounds=1)
        assert set(times) == set(FORMS) and all(ms > 0 for ms in times.values())
        assert set(engine.backend.sessions) == set(forms_of(UNCUT))
