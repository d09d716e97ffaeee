"""A wheel of 250 MB that travels to a machine without a registry, in parts of a few MiB; there a folder collects them.

python3 -m benchmarks.gpu.kit.wheel_parts WHEEL --to FOLDER [--mib 18] [--compute 90]

GPU code for other architectures than ``--compute`` is replaced by zeros, which compress to nothing; offsets stay, so that the
library still finds its own (Zhang and others, "The Hidden Bloat in Machine Learning Systems", 2025, do the same). Give
``--compute 0`` to keep everything. What the runtime does not need is left out: ``_LEFT_OUT``.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import re
import struct
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

_LEFT_OUT = re.compile(r"onnxruntime/(tools|transformers|quantization)/|providers_tensorrt|ThirdPartyNotices")
_PART = re.compile(r"part-(\d+)-of-(\d+)-([0-9a-f]{12})$")
_CONTAINER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")  # headers: magic, version, size of header, of payload
_MAGIC, _ARCHITECTURE_AT = 0xBA55ED50, 28  # of a fat binary; where an entry's header holds the compute capability
_SECTION = b".nv_fatbin"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--mib", type=float, default=18.0)
    parser.add_argument("--compute", type=int, default=90)
    given = parser.parse_args()
    parts = split(packed(given.wheel, given.compute), given.to, int(given.mib * 2**20))
    print(f"{len(parts)} parts in {given.to}, {sum(part.stat().st_size for part in parts) / 2**20:.0f} MiB together")


def packed(wheel: Path, compute: int) -> bytes:
    """The wheel's files, without other architectures' code, as an LZMA-compressed zip."""
    files = BytesIO()
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(files, "w", zipfile.ZIP_STORED) as target:
        for name in source.namelist():
            if not _LEFT_OUT.search(name):
                content = source.read(name)
                target.writestr(name, pruned(content, compute) if compute and name.endswith(".so") else content)
    return lzma.compress(files.getvalue(), preset=1)


def pruned(library: bytes, compute: int) -> bytes:
    """A shared library (64-bit ELF) whose GPU code for other architectures than ``compute`` is zeros."""
    content = bytearray(library)
    for start, end in _gpu_sections(library):
        place = start
        while place + _CONTAINER.size <= end:
            magic, _, header, size = _CONTAINER.unpack_from(library, place)
            if magic != _MAGIC:
                place += 8  # padding between fat binaries
                continue
            _clear(content, place + header, place + header + size, compute)
            place += header + size
    return bytes(content)


def _clear(content: bytearray, place: int, end: int, compute: int) -> None:
    """Zeros in the entries of one fat binary that are for other architectures."""
    while place + _ENTRY.size <= end:
        _, _, header, size = _ENTRY.unpack_from(content, place)
        if struct.unpack_from("<I", content, place + _ARCHITECTURE_AT)[0] != compute:
            content[place + header : place + header + size] = bytes(size)
        place += header + size


def _gpu_sections(library: bytes) -> Iterator[tuple[int, int]]:
    """Begin and end of the sections that hold fat binaries; none where ``library`` is no ELF file."""
    if library[:4] != b"\x7fELF":
        return
    table, (entry, count, names) = struct.unpack_from("<Q", library, 0x28)[0], struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + index * entry) for index in range(count)]
    for name, _, _, _, offset, size in headers:
        start = headers[names][4] + name
        if library[start : start + len(_SECTION) + 1] == _SECTION + b"\0":
            yield offset, offset + size


def split(content: bytes, folder: Path, part_bytes: int) -> list[Path]:
    """``content`` as files in ``folder``, named by their number and by what they make up."""
    folder.mkdir(parents=True, exist_ok=True)
    key, count = hashlib.sha256(content).hexdigest()[:12], -(-len(content) // part_bytes)
    paths = []
    for number in range(count):
        paths.append(folder / f"part-{number}-of-{count}-{key}")
        paths[-1].write_bytes(content[number * part_bytes : (number + 1) * part_bytes])
    return paths


def collect(parts: Path, store: Path) -> str:
    """Keep ``parts`` in ``store``, and unpack the wheel to ``store/site`` once all are there. Returns what was done."""
    store.mkdir(parents=True, exist_ok=True)
    for path in sorted(parts.iterdir()) if parts.is_dir() else []:
        if _PART.search(path.name) and not (store / path.name).exists():
            (store / path.name).write_bytes(path.read_bytes())
    found = {path: match for path in store.iterdir() if (match := _PART.search(path.name))}
    if not found:
        return "no parts of onnxruntime-gpu"
    newest = max(found, key=lambda path: path.stat().st_mtime)
    _, count, key = found[newest].groups()
    own = {int(match[1]): path for path, match in found.items() if match[3] == key}
    if missing := sorted(set(range(int(count))) - set(own)):
        return f"{len(own)} of {count} parts of onnxruntime-gpu are here; bring the others: {missing}"
    if not (store / "site").exists():
        _unpack(b"".join(own[number].read_bytes() for number in range(int(count))), key, store)
    return "onnxruntime-gpu is unpacked"


def _unpack(content: bytes, key: str, store: Path) -> None:
    if hashlib.sha256(content).hexdigest()[:12] != key:
        raise ValueError(f"the parts in {store} do not make up {key}; delete the folder and bring them again")
    with zipfile.ZipFile(BytesIO(lzma.decompress(content))) as files:
        files.extractall(store / ".site")
    (store / ".site").rename(store / "site")


if __name__ == "__main__":
    main()
