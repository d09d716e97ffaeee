"""Run the conformance check in real bindings, in a process of its own; prints JSON.

python in_bindings.py MODULE FOLDER STUB,STUB… FILE…      FOLDER: where the package lies, '' for where Python finds it
"""

import ctypes
import importlib
import json
import sys
from pathlib import Path


def main() -> None:
    module, folder, stubs, *files = sys.argv[1:]
    for stub in filter(None, stubs.split(",")):
        ctypes.CDLL(stub, mode=ctypes.RTLD_GLOBAL)
    if folder:
        sys.path.insert(0, folder)
    trt = importlib.import_module(module)
    from api.conformance import check

    result = check(trt, [Path(file) for file in files])
    print(json.dumps({"version": trt.__version__, "problems": result.problems, "checked": sorted(result.checked)}))


main()
