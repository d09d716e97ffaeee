"""README's table of what has been verified how, for each target: drawn from the runs in docs/results only.

executed                  a run in docs/results whose settings name the target (``targets``); of benchmarks that are not in
                          ``benchmarks/gpu`` those that name none ran on the CPU
compiled ahead of time    a row of the newest ``built_engines``
checked against the API   a row of the newest ``api_conformance`` without problems, of the release that the target needs
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from tide_bench.tables import markdown_table

from tide_export.targets import TARGETS
from tide_export.targets.base import Target

NOT_YET = "not yet"
_RUN_GRAPHS = ("onnxruntime", "torch")  # backends that run a bundle's graphs, of which nothing is compiled
_EVIDENCE = ("built_engines", "api_conformance", "size", "held_out", "rtx_int4")  # runs that execute no target
_ON_GPU = {path.stem for path in (Path(__file__).resolve().parent / "gpu").glob("*.py")}
Run = dict[str, Any]


def verified_table(results: Path) -> str:
    """The table, targets with the same evidence in one row."""
    runs = list(_runs(results))
    by_evidence = groupby(TARGETS.values(), key=lambda target: _evidence(target, runs))
    headings = ["target", "executed", "compiled ahead of time", "checked against the API"]
    return "\n".join(markdown_table(headings, ([_names(targets), *cells] for cells, targets in by_evidence)))


def _runs(results: Path) -> Iterator[Run]:
    """The newest first: files are named DATE-benchmark.json."""
    for path in sorted(results.glob("*.json"), reverse=True):
        yield json.loads(path.read_text(encoding="utf-8"))


def _names(targets: Iterable[Target]) -> str:
    return ", ".join(f"`{target.name}`" for target in targets)


def _evidence(target: Target, runs: list[Run]) -> tuple[str, str, str]:
    return _executed(target, runs), _compiled(target, runs), _checked(target, runs)


def _executed(target: Target, runs: list[Run]) -> str:
    for run in runs:
        if target.name in _targets(run):
            return f"yes: {run['machine'].get('gpu', run['machine']['cpu'])}, {run['date'][:10]}"
    return NOT_YET


def _targets(run: Run) -> list[str]:
    """What was executed. A benchmark of the GPU that forgets to say must not count as one of the CPU."""
    benchmark = run["benchmark"]
    return [] if benchmark in _EVIDENCE else run["settings"].get("targets", [] if benchmark in _ON_GPU else ["cpu"])


def _compiled(target: Target, runs: list[Run]) -> str:
    if target.backend.startswith(_RUN_GRAPHS):
        return "nothing to compile"
    for run in (run for run in runs if run["benchmark"] == "built_engines"):
        for row in run["rows"]:
            if row["target"] == target.name:
                return f"yes: {row['tool']}, {run['date'][:10]}"
    return NOT_YET


def _checked(target: Target, runs: list[Run]) -> str:
    if target.backend.startswith(_RUN_GRAPHS):
        return "–"
    package = target.backend.replace("-", "_")
    wanted = target.machine.backend.split()[-1]  # TensorRT 11
    for run in (run for run in runs if run["benchmark"] == "api_conformance"):
        for row in run["rows"]:
            if row["package"] == package and row["version"].startswith(f"{wanted}.") and not row["problems"]:
                return f"yes: {row['uses']} uses in {row['version']}, {run['date'][:10]}"
    return NOT_YET
