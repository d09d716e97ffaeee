"""A rented GPU machine's Python: these packages, this repository beside them without an installation, and no registry.

A dry run hides every other package that happens to be installed, so that a missing one is found without a GPU.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (".", "runtime", "calibrate", "plugins", "bench")  # of this repository's packages
_SIMULATIONS = "tests"  # a dry run assembles graphs on the tests' simulated GPU
OWN = frozenset({"benchmarks", "tide_runtime", "tide_serve", "tide_calibrate", "tide_plugins", "tide_bench", "tide_export"})
_OF_TESTS = frozenset({"runtime", "plugins"})

# The packages of the image on which the kit has to run, as its list of 2026-11-17 names them.
PACKAGES = frozenset(Path(__file__).with_name("image_packages.txt").read_text(encoding="utf-8").split())


def make_importable(work: Path) -> None:
    """Put this repository before everything else on ``sys.path``, here and in child processes.

    ``work``: a folder for the package's metadata, without which its entry points, the loop kernels among them, are not found.
    """
    places = [*(str(ROOT / folder) for folder in FOLDERS), str(_metadata(work))]
    sys.path[:] = [*places, *(place for place in sys.path if place not in places)]
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, *(place for place in before if place and place not in places)])


def _metadata(work: Path) -> Path:
    """A folder with what ``pip install`` would leave of pyproject.toml: name, version, entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = work / "metadata" / f"tide_llm-{project['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    return folder.parent.resolve()


def hide_other_packages() -> None:
    """From here on, only the image's packages, the standard library and this repository can be imported."""
    sys.path.append(str(ROOT / _SIMULATIONS))
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
    for module in _owners().keys() - sys.modules.keys():
        if not in_image(module):
            sys.modules[module] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError


def in_image(module: str) -> bool:
    """Whether a top-level ``module`` can be imported on the image; one that no package owns is part of an extension."""
    if module in sys.stdlib_module_names or module in OWN | _OF_TESTS or module == "__main__":
        return True
    owners = _owners().get(module)
    return owners is None or not _allowed().isdisjoint(owners)


@cache
def _owners() -> dict[str, set[str]]:
    """Top-level module → the installed packages that provide it."""
    return {module: {_plain(name) for name in names} for module, names in packages_distributions().items()}


@cache
def _allowed() -> frozenset[str]:
    """`PACKAGES`, and what these need as they are installed here, perhaps in other versions."""
    needed, waiting = set(PACKAGES), list(PACKAGES)
    while waiting:
        try:
            lines = requires(waiting.pop()) or []
        except PackageNotFoundError:
            continue
        further = {_plain(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines if "extra ==" not in line} - needed
        needed |= further
        waiting += further
    return frozenset(needed)


def _plain(name: str) -> str:
    """The package's name as `PACKAGES` spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()
