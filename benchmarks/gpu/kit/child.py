"""One stage's process: runs the cases of a module and writes a JSON line before and after each to the parent's pipe.

After a fault that made the CUDA context unusable it ends with `LOST`, and the parent starts another one for the other cases.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.kit.bare_image import hide_other_packages
from benchmarks.gpu.kit.case import Bench, KitCase, NotRun

PASSED, FAILED, NOT_RUN, PREPARED = "passed", "failed", "not run", "prepared"
LOST = 75  # exit code
_HARMLESS = {"CUDA_SUCCESS", "CUDA_ERROR_NOT_INITIALIZED", "CUDA_ERROR_INVALID_CONTEXT"}  # the last two: no context was made


def run(given: dict[str, Any]) -> int:
    """Run the cases of ``given["module"]`` but those in ``given["done"]``; returns the exit code."""
    bench = Bench(given["arch"], Path(given["work"]), Path(given["carried"]), given["dry"])
    if bench.dry:
        hide_other_packages()
    with os.fdopen(given["pipe"], "w", encoding="utf-8", buffering=1) as lines:
        module = import_module(given["module"], "benchmarks.gpu")
        for case in module.kit_cases(bench, given["argument"]):
            if case.name in given["done"]:
                continue
            print(json.dumps({"begin": case.name}), file=lines)
            begin = time.perf_counter()
            result = tried(case, bench.dry)
            seconds = round(time.perf_counter() - begin, 3)
            print(json.dumps({"case": case.name, **result, "seconds": seconds}, default=_plain), file=lines)
            if result["state"] == FAILED and not bench.dry and lost_context() is not None:
                return LOST
    return 0


def tried(case: KitCase, dry: bool) -> dict[str, Any]:
    work = case.prepare if dry else case.execute
    try:
        return {"state": PREPARED if dry else PASSED, "figures": work()}
    except NotRun as reason:
        return {"state": NOT_RUN, "reason": str(reason)}
    except Exception as error:  # every library raises its own classes, and the other cases are tried all the same
        text = traceback.format_exc()
        print(f"{case.name}:\n{text}", file=sys.stderr, flush=True)
        return {"state": FAILED, "reason": f"{type(error).__name__}: {error}", "traceback": text}


def _plain(value: Any) -> Any:
    """NumPy's and torch's numbers as Python's; of anything else its text."""
    return value.item() if hasattr(value, "item") else str(value)


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


if __name__ == "__main__":
    faulthandler.enable()
    code = run(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code)  # libraries that hang or die while they are torn down would look like a failed case
