"""Note which engines of a bundle were compiled on this machine, without a GPU: what `make demo-rtx` leaves in build/demo-rtx.

python -m benchmarks.built_engines build/demo-rtx --json docs/results/DATE-built_engines.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from tide_bench.report import Report
from tide_runtime.bundle.manifest import Manifest, TargetInfo, read_manifest


def main(
    bundle: Annotated[Path, typer.Argument(help="A bundle with engines.")],
    json: Annotated[Path | None, typer.Option(help="Where to write the results.")] = None,
) -> None:
    """One row for each target that has engines: how many, how long their builds took, how large they are."""
    manifest = read_manifest(bundle)
    report = Report("built_engines", model=manifest.model.name, dtype=manifest.dtype)
    for name, target in manifest.targets.items():
        if target.engines:
            report.rows.append(row(name, target, manifest))
            key = name.replace("-", "_").replace("+", "_plus")
            report.add(f"{key}_seconds", report.rows[-1]["seconds"])
            report.add(f"{key}_mib", report.rows[-1]["mib"])
    report.finish(json)


def row(name: str, target: TargetInfo, manifest: Manifest) -> dict[str, Any]:
    """``seconds``: of the builds, whenever they were made; ``mib``: of the files."""
    sizes = [manifest.files[file].bytes for graph, file in target.graphs.items() if graph in target.engines]
    return {
        "target": name,
        "tool": target.tool,
        "engines": len(target.engines),
        "seconds": round(sum(engine.build_seconds for engine in target.engines.values()), 1),
        "mib": round(sum(sizes) / 2**20, 1),
    }


if __name__ == "__main__":
    typer.run(main)
