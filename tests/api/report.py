"""Write the results of the API check, for README's table: PYTHONPATH=tests python -m api.report --json FILE."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from api import bindings
from api.test_tensorrt_api import NEWER_THAN_10_4, checked, files_for
from tide_bench.report import Report

# package, release, files that are not checked against it
CHECKS = (("tensorrt", "11.4", frozenset()), ("tensorrt", "10.4", NEWER_THAN_10_4), ("tensorrt_rtx", "", frozenset()))


def main(json: Annotated[Path | None, typer.Option(help="Where to write the results.")] = None) -> None:
    """Check all uses of TensorRT's API against the bindings installed by `make bindings`."""
    report = Report("api_conformance")
    for package, release, left_out in CHECKS:
        files = [path for path in files_for(package) if path.name not in left_out]
        with tempfile.TemporaryDirectory() as folder:
            installed = bindings.folder(release) if release else None
            stubs = bindings.empty_libraries(installed, Path(folder)) if installed is not None else []
            result = checked(bindings.MODULE if release else package, str(installed or ""), stubs, files)
        uses, problems = len(result["checked"]), len(result["problems"])
        report.rows.append({"package": package, "version": result["version"], "uses": uses, "problems": problems})
        name = f"{package}_{result['version'].replace('.', '_')}"
        report.add(f"{name}_uses", uses)
        report.add(f"{name}_problems", problems)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
