"""A minimal root for an image, made of this machine's files: a shell, Python with pip, and the packages that a server needs.

No image can be pulled where there is no registry of images, and this takes a few seconds.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

PROGRAMS = ("sh", "ls", "rm")
_LIBRARY = Path("usr", "local", "lib", f"python{sys.version_info.major}.{sys.version_info.minor}")


def write_root(root: Path, extra: str) -> None:
    """Fill the folder ``root``. ``extra``: of tide-llm, whose dependencies are installed there, without tide-llm itself."""
    python = root / "usr" / "local" / "bin"
    python.mkdir(parents=True)
    shutil.copy2(Path(sys.base_prefix, "bin", _LIBRARY.name), python)
    (python / "python").symlink_to(_LIBRARY.name)
    (python / "pip").write_text(f'#!/bin/sh\nexec /usr/local/bin/{_LIBRARY.name} -m pip "$@"\n')
    (python / "pip").chmod(0o755)
    left_out = shutil.ignore_patterns("test", "idlelib", "site-packages", "__pycache__", "*.a")
    shutil.copytree(Path(sys.base_prefix, "lib", _LIBRARY.name), root / _LIBRARY, ignore=left_out)
    packages = root / _LIBRARY / "site-packages"
    for package in [*_needed("tide-llm", extra), distribution("pip")]:
        _copy_package(package, packages)
    programs = [Path(found) for name in PROGRAMS if (found := shutil.which(name))]
    for program in programs:
        shutil.copy2(program, _made(root / "bin" / program.name))
    _copy_libraries(root, [*programs, python / _LIBRARY.name, *root.rglob("*.so*")])
    (root / "tmp").mkdir(mode=0o777)
    (root / "tmp").chmod(0o1777)
    (root / "etc").mkdir()
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\n")


def _needed(name: str, extra: str) -> list[Distribution]:
    """The installed packages that ``name`` with ``extra`` depends on, itself left out."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(f"{name}[{extra}]")]
    while waiting:
        wanted = waiting.pop()
        package = distribution(wanted.name)
        key = f"{package.name.lower()}[{','.join(sorted(wanted.extras))}]"
        if key in found:
            continue
        found[key] = package
        for requirement in map(Requirement, package.requires or ()):
            extras = ("", *wanted.extras)
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": one}) for one in extras):
                waiting.append(requirement)
    return list({package.name: package for package in found.values() if package.name != name}.values())


def _copy_package(package: Distribution, target: Path) -> None:
    for file in package.files or ():
        source = Path(str(package.locate_file(file)))
        if ".." not in file.parts and file.suffix != ".pyc" and source.is_file():
            shutil.copy2(source, _made(target / file))


def _copy_libraries(root: Path, files: list[Path]) -> None:
    """The shared libraries of the system that ``files`` need, to where they are here."""
    listed = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True).stdout  # 1: some have none
    for word in set(listed.split()):
        path = Path(word)
        if path.is_absolute() and ".so" in path.name and not path.is_relative_to(root) and path.is_file():
            shutil.copy2(path, _made(root / path.relative_to("/")))


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
