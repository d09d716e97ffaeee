"""Where the time of a comparison went: seconds by phase, and within a phase by arm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from time import perf_counter

Announce = Callable[[str], None]


class Phases:
    """``seconds``: phase → part → seconds, in the order they began. Arms may be prepared by several threads at once."""

    def __init__(self, announce: Announce) -> None:
        self.seconds: dict[str, dict[str, float]] = {}
        self._announce, self._lock = announce, Lock()

    @contextmanager
    def __call__(self, phase: str, part: str = "") -> Iterator[None]:
        """Time what is done inside; time of the same phase and part adds up."""
        self._announce(f"{phase}: {part}" if part else phase)
        with self._lock:
            self.seconds.setdefault(phase, {}).setdefault(part, 0.0)
        start = perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[phase][part] += perf_counter() - start


def phase_lines(seconds: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line for each phase of `Phases.seconds`: its sum, and its parts, longest first."""
    lines = []
    for phase, parts in seconds.items():
        named = sorted(((s, part) for part, s in parts.items() if part), reverse=True)
        detail = ": " + ", ".join(f"{part} {s:.1f}" for s, part in named) if named else ""
        lines.append(f"{phase} {sum(parts.values()):.1f} s{detail}")
    return lines
