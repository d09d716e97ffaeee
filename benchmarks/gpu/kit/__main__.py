"""python3 -m benchmarks.gpu.kit, from the repository's root; nothing has to be installed."""

from __future__ import annotations

from benchmarks.gpu.kit.bare_image import ROOT, make_importable

if __name__ == "__main__":
    make_importable(ROOT / "build" / "gpu-kit" / "work")
    import typer

    from benchmarks.gpu.kit.command import main

    typer.run(main)
