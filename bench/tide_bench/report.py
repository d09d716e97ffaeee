"""The output of every benchmark: the machine, tables, what they were made of, named figures, and where the time went.

A figure that the project quotes is a line ``RESULT name=value`` on stdout; ``--json FILE`` holds the same and everything else.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

from numpy._core._multiarray_umath import __cpu_features__

from tide_bench.tables import Table, console

# Those that change which kernels run and how they round, of the processors that ONNX Runtime has kernels for.
_INSTRUCTIONS = {
    "SSE41": "SSE4.1", "AVX": "AVX", "AVX2": "AVX2", "AVX512F": "AVX512", "AVX512VNNI": "AVX512-VNNI",
    "AVX512BF16": "AVX512-BF16", "ASIMD": "NEON", "ASIMDDP": "dot-product", "SVE": "SVE",
}  # fmt: skip
_PACKAGES = ("onnxruntime", "onnxruntime-genai", "openvino-genai", "torch", "transformers", "xllamacpp")


class Report:
    """One run of one benchmark.

    Args:
        benchmark: the script's name.
        settings: the options of the run, stored with the figures.
    """

    def __init__(self, benchmark: str, **settings: Any) -> None:
        self.benchmark, self.settings = benchmark, settings
        self.machine = machine()
        self.date = datetime.now(UTC).isoformat(timespec="seconds")
        self.results: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []  # figures that the tables are made of
        self.tables: list[Table] = []

    def add(self, name: str, value: float) -> None:
        """Note a figure. Raises ValueError for a name that a RESULT line cannot hold, a second value, or a NaN."""
        if not re.fullmatch(r"\w+", name):
            raise ValueError(f"the result name is {name!r}; use letters, digits and underscores")
        if name in self.results:
            raise ValueError(f"the result {name} was given twice")
        if not math.isfinite(value):
            raise ValueError(f"the result {name} is {value}; leave out what was not measured")
        self.results[name] = float(value)

    def table(
        self,
        title: str,
        headings: Sequence[str],
        rows: Iterable[Sequence[str]],
        caption: str = "",
        notes: Iterable[str] = (),
        faint: Sequence[int] = (),
    ) -> None:
        """Print a table and keep its cells: they are what the documentation shows. For the arguments see `Table`.

        Raises ValueError for a row with another number of cells than headings.
        """
        kept = Table(title, list(headings), [list(row) for row in rows], caption, list(notes), list(faint))
        if any(len(row) != len(kept.headings) for row in kept.rows):
            raise ValueError(f"table {title!r} has {len(kept.headings)} headings and rows of other lengths; give a cell for each")
        self.tables.append(kept)
        kept.print(console())

    def statement(self, title: str, text: str) -> None:
        """Print a sentence with figures, and keep it among the tables."""
        self.table(title, (), (), text)

    def finish(self, path: Path | None = None) -> None:
        """Print the machine and the RESULT lines; write everything to the file ``path`` when given."""
        print(self.machine_line())
        print("\n".join(self.result_lines()), flush=True)
        if path is not None:
            self.write(path)

    def machine_line(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.machine.items()) + f", {self.date}"

    def result_lines(self) -> list[str]:
        """``RESULT name=value``: whole numbers in full, others with four significant digits."""
        shown = {name: f"{value:.0f}" if value.is_integer() else f"{value:.4g}" for name, value in self.results.items()}
        return [f"RESULT {name}={value}" for name, value in shown.items()]

    def write(self, path: Path) -> None:
        """Write everything as JSON; the folder is made when it is missing."""
        names = ("benchmark", "date", "machine", "settings", "results", "rows")
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {name: getattr(self, name) for name in names} | {"tables": [asdict(table) for table in self.tables]}
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def machine() -> dict[str, str | int]:
    """The CPU and its instruction sets, the cores this process may use, the memory, and the versions of everything compared."""
    facts: dict[str, str | int] = {"cpu": cpu_model(), "instructions": instruction_sets(), "cores": cores()}
    facts |= {"memory_gib": _memory_gib()}
    facts |= {"system": f"{platform.system()} {platform.machine()}", "python": platform.python_version()}
    return facts | {name: _version(name) for name in _PACKAGES}


def cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cpu_model() -> str:
    """The CPU's name and number as Linux knows them; virtual machines often hide all but the family."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    name = facts.get("model name") or platform.processor() or "unknown"
    return f"{name} (family {facts['cpu family']})" if "cpu family" in facts else name


def instruction_sets() -> str:
    """The instruction sets by which processors round differently, oldest first, as the processor itself reports them: under
    emulation /proc/cpuinfo shows the host's."""
    found: dict[str, bool] = __cpu_features__
    return " ".join(name for feature, name in _INSTRUCTIONS.items() if found.get(feature)) or "unknown"


def _memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def _version(package: str) -> str:
    for name in (package, f"{package}-gpu"):  # onnxruntime-gpu brings the module onnxruntime
        with suppress(PackageNotFoundError):
            return version(name)
    return "not installed"


class Phases:
    """``seconds``: phase → part → seconds, in the order they began."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.seconds: dict[str, dict[str, float]] = {}
        self._announce = announce

    @contextmanager
    def __call__(self, phase: str, part: str = "") -> Iterator[None]:
        """Time what is done inside; time of the same phase and part adds up."""
        self._announce(f"{phase}: {part}" if part else phase)
        self.seconds.setdefault(phase, {}).setdefault(part, 0.0)
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[phase][part] += perf_counter() - start


def phase_lines(seconds: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line for each phase of `Phases.seconds`: its sum, and its parts, longest first."""
    lines = []
    for phase, parts in seconds.items():
        named = sorted(((s, part) for part, s in parts.items() if part), reverse=True)
        detail = ": " + ", ".join(f"{part} {s:.1f}" for s, part in named) if named else ""
        lines.append(f"{phase} {sum(parts.values()):.1f} s{detail}")
    return lines
