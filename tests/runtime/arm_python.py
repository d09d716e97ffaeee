"""Python for Arm under user-mode emulation: Debian's arm64 packages and PyPI's aarch64 wheels, in a folder of their own.

Nothing is installed on the machine. qemu looks for each file below the folder first; a list of processors there stands in for the
machine's /proc/cpuinfo, in which a library for Arm finds no Arm processor and ends with a segmentation fault.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = "qemu-aarch64"
_VERSION = "3.11"  # of Python in Debian 12, for which wheels are taken
_PACKAGES = (
    *(f"{name}{_VERSION}{part}" for name, part in (("python", "-minimal"), ("libpython", "-minimal"), ("libpython", "-stdlib"))),
    *("libc6", "libcrypt1", "libstdc++6", "libgcc-s1", "zlib1g", "libssl3", "libexpat1", "libffi8", "libbz2-1.0", "liblzma5"),
    *("libsqlite3-0", "libuuid1", "libncursesw6", "libtinfo6", "libreadline8", "libdb5.3", "media-types"),
)
_TESTS_NEED = ("pytest>=8.4,<9", "pytest-timeout", "hypothesis", "onnx", "ml-dtypes", "psutil", "llguidance")
_PLATFORMS = (*(f"manylinux_2_{minor}_aarch64" for minor in (17, 24, 26, 27, 28, 31)), "manylinux2014_aarch64")
_CPU = """processor\t: {number}
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""


def unavailable() -> str | None:
    """Why there can be none here; None: there can, if the registries answer."""
    missing = [name for name in (EMULATOR, "apt-get", "dpkg-deb") if shutil.which(name) is None]
    return f"{' and '.join(missing)} missing; on Debian 12: apt-get install qemu-user" if missing else None


def arm_command(arguments: Sequence[str], folder: Path) -> tuple[list[str], dict[str, str]]:
    """The command and environment of Python for Arm with ``arguments``, made below ``folder`` where it is not there.

    Raises subprocess.CalledProcessError where a registry does not answer.
    """
    if not (folder / "site").is_dir():
        _make_root(folder / "root", folder / "apt")
        _unpack_wheels(folder / "wheels", folder / "site.new")
        (folder / "site.new").rename(folder / "site")
    ours = [str(ROOT / name) for name in ("tests", "bench", "runtime", "calibrate", "plugins")]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        "PYTHONPATH": os.pathsep.join([str(folder / "site"), *ours]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TIDE_CACHE_DIR": str(folder / "cache"),
        "OPENBLAS_NUM_THREADS": "1",
    }
    return [EMULATOR, "-L", str(folder / "root"), str(folder / f"root/usr/bin/python{_VERSION}"), *arguments], environment


def _make_root(root: Path, state: Path) -> None:
    for part in ("lists/partial", "cache/archives/partial"):
        (state / part).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    options = {"APT::Architecture": "arm64", "APT::Architectures": "arm64", "Dir::State": state, "Dir::Cache": state / "cache"}
    options |= {"Dir::State::status": state / "status", "Dir::State::lists": state / "lists"}
    apt = ["apt-get", "-q", *(part for name, value in options.items() for part in ("-o", f"{name}={value}"))]
    _run([*apt, "update"], state)
    _run([*apt, "download", *_PACKAGES], state)
    for package in state.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(root)], state)
    (root / "proc").mkdir()
    (root / "proc" / "cpuinfo").write_text("".join(_CPU.format(number=number) for number in range(os.cpu_count() or 1)))


def _unpack_wheels(wheels: Path, site: Path) -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--python-version", _VERSION]
    platforms = [part for one in _PLATFORMS for part in ("--platform", one)]
    constraints = ["--constraint", str(ROOT / ".ci" / "constraints.txt")]
    wheels.mkdir(exist_ok=True)
    _run([*pip, *platforms, *constraints, "--dest", str(wheels), *needed, *_TESTS_NEED], wheels)
    for wheel in wheels.glob("*.whl"):
        shutil.unpack_archive(wheel, site, "zip")


def _run(command: Sequence[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
