"""TensorRT's real Python bindings, where `make bindings` puts them, and empty libraries that let them be imported anywhere.

The bindings of a release are a package of their own, without the library that they bind. They import when libraries of the right
names export the symbols they name; nothing behind those symbols is ever called.
"""

import re
import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "bindings"
MODULE = "tensorrt_bindings"
_SYMBOLS = r"create\w+_INTERNAL|get\w*PluginRegistry|getNvOnnxParserVersion|initLibNvInferPlugins"


def folder(release: str) -> Path | None:
    """Folder of the installed bindings of ``release``, such as 11.4, or None."""
    path = FOLDER / release
    return path if (path / MODULE).is_dir() else None


def empty_libraries(installed: Path, made_in: Path) -> list[Path]:
    """Compile the libraries that the bindings in ``installed`` need into ``made_in``."""
    extension = str(installed / MODULE / "tensorrt.so")
    undefined = _output("nm", "-D", "--undefined-only", extension)
    symbols = re.findall(rf" U ({_SYMBOLS})$", undefined, re.MULTILINE)
    source = made_in / "empty.c"
    source.write_text("".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in symbols))
    libraries = [made_in / name for name in re.findall(r"\[(libnv\S+)\]", _output("readelf", "-d", extension))]
    for library in libraries:
        soname = f"-Wl,-soname,{library.name}"
        subprocess.run(["gcc", "-shared", "-fPIC", soname, str(source), "-o", str(library)], check=True)
    return libraries


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
