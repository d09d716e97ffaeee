"""One stage in a process of its own: python -m benchmarks.gpu.kit.child NUMBER --journal FILE …; the parent is `run_stage`.

Cases that the journal already has a result of are left out. After a fault that made the CUDA context unusable the process ends
with `LOST`, and the parent starts another one for the remaining cases.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import cast

from benchmarks.gpu.kit.bare_image import hide_other_packages
from benchmarks.gpu.kit.case import Bench, Figures, KitCase, NotRun, StageModule
from benchmarks.gpu.kit.journal import FAILED, NOT_RUN, PASSED, PREPARED, Journal, Result, read
from benchmarks.gpu.kit.plan import STAGES

LOST = 75  # exit code
_ERROR_LINES = 12  # of a traceback that are kept
_MOST_LINES = 60  # of output; stages with more cases print those that fail
_HARMLESS = {"CUDA_SUCCESS", "CUDA_ERROR_NOT_INITIALIZED", "CUDA_ERROR_INVALID_CONTEXT"}  # the last two: no context was made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("number", type=int)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--arch", required=True)
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    if given.dry:
        hide_other_packages()
    sys.exit(run(given.number, Bench(given.arch, given.work, given.dry), given.journal))


def run(number: int, bench: Bench, path: Path) -> int:
    """Run the cases that have no result yet; the exit code."""
    stage, journal, earlier = STAGES[number], Journal(path), read(path)
    module = cast(StageModule, import_module(f"benchmarks.gpu.kit.stages.{stage.module}"))
    cases = list(module.cases(bench))
    journal.planned({case.name: {"seconds": case.seconds, "limit": case.limit} for case in cases})
    for case in cases:
        if case.name in earlier.results:
            continue
        journal.begin(case.name)
        begin = time.perf_counter()
        result = _tried(case, bench.dry)
        journal.end(result | {"seconds": round(time.perf_counter() - begin, 3)})
        if len(cases) <= _MOST_LINES or result["state"] == FAILED:
            print(f"{result['case']}: {result['state']}{_reason(result)}", flush=True)
        if result["state"] == FAILED and not bench.dry and lost_context() is not None:
            return LOST
    return 0


def _tried(case: KitCase, dry: bool) -> Result:
    work: Callable[[], Figures] = case.prepare if dry else case.execute
    try:
        return {"case": case.name, "state": PREPARED if dry else PASSED, "figures": work()}
    except NotRun as reason:
        return {"case": case.name, "state": NOT_RUN, "reason": str(reason)}
    except Exception as error:  # every library raises its own classes, and the other cases are tried all the same
        lines = "".join(traceback.format_exception(error)).splitlines()[-_ERROR_LINES:]
        why = f"{type(error).__name__}: {error}"
        return {"case": case.name, "state": FAILED, "reason": why, "traceback": "\n".join(lines)}


def lost_context() -> str | None:
    """CUDA's name of a fault after which this process's context can do nothing more, or None."""
    driver = sys.modules.get("cuda.bindings.driver")
    if driver is None:
        return None
    try:
        [error] = driver.cuCtxSynchronize()
    except RuntimeError:  # there is no driver
        return None
    return error.name if error.name not in _HARMLESS else None


def _reason(result: Result) -> str:
    return f" ({result['reason'].splitlines()[0][:160]})" if result.get("reason") else ""


if __name__ == "__main__":
    main()
