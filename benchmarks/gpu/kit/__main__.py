"""python3 -m benchmarks.gpu.kit, from the repository's root; nothing has to be installed. See docs/gpu-kit.md."""

from __future__ import annotations

from benchmarks.gpu.kit.bare_image import ROOT, make_importable

if __name__ == "__main__":
    make_importable(ROOT / "build" / "gpu-kit")
    from benchmarks.gpu.kit.command import main

    main()
