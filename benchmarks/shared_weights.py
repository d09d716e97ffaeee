"""What packed weights in a bundle are worth: memory, load time and speed with them and, in the same run, without.

Graphs are loaded in stages (segments, then other forms, then all), each run once, in one process and then in a second one
beside it. Memory is the proportional set size, which counts a page once however many graphs and processes map it, above what
the process held before the first graph; "own" is what no other process can share. Speed: steps of both bundles' segments in
turn, in one process; where a weight happens to lie is worth a few percent, so both are loaded several times.

    python -m benchmarks.shared_weights engine/
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import onnx
import onnxruntime as ort
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from tide_bench.in_process import run_in_process
from tide_bench.report import Report
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import MANIFEST_NAME, UNCUT, Manifest, forms_of, read_manifest

from tide_export.bundle_writer import ONNX_FOLDER, WEIGHTS_NAME, hash_files

_DTYPES: dict[str, type[np.generic]] = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}
_STEPS = 10  # timed together: one step of a small model is a few milliseconds
_ROUNDS = 20


@dataclass(frozen=True)
class Held:
    """After a stage: seconds that loading took so far, and MiB above an empty process. ``own``: of this process alone."""

    seconds: float
    total: float
    own: float


def without_packed(bundle: Path, folder: Path) -> Path:
    """The same bundle as ``tide-export --no-packed-weights`` writes it, in ``folder``."""
    shutil.copytree(bundle, folder, ignore=shutil.ignore_patterns(WEIGHTS_NAME, MANIFEST_NAME))
    end = max(_unpack(file) for file in (folder / ONNX_FOLDER).glob("*.onnx"))
    with (bundle / ONNX_FOLDER / WEIGHTS_NAME).open("rb") as source, (folder / ONNX_FOLDER / WEIGHTS_NAME).open("wb") as target:
        while target.tell() < end:  # what is packed lies behind all weights
            target.write(source.read(min(1 << 24, end - target.tell())))
    manifest = replace(read_manifest(bundle), files=hash_files(folder))
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return folder


def _unpack(file: Path) -> int:
    """Take the packed weights out of the graph in ``file``; where its last weight ends."""
    model, end = onnx.load(file, load_external_data=False), 0
    for tensor in model.graph.initializer:
        values = {entry.key: entry.value for entry in tensor.external_data if not entry.key.startswith("prepacked")}
        del tensor.external_data[:]
        for key, value in values.items():
            tensor.external_data.add(key=key, value=value)
        end = max(end, int(values.get("offset", 0)) + int(values.get("length", 0)))
    onnx.save(model, file)
    return end


def stages_of(manifest: Manifest) -> dict[str, list[str]]:
    """Stage → the graphs that it adds; together all that the target ``cpu`` has."""
    files, segments = manifest.targets["cpu"].graphs, [segment.name for segment in manifest.segments]
    stages = {
        "segments": segments,
        "+ for several rows": [form for name in segments for form in forms_of(name)[1:] if form in files],
        "+ uncut": [form for form in forms_of(UNCUT) if form in files],
    }
    named = {name for names in stages.values() for name in names}
    stages["all graphs"] = [name for name in files if name not in named]
    return {stage: names for stage, names in stages.items() if names}


class LoadedGraphs:
    """Sessions of some graphs of a bundle, on one thread, without patterns of memory."""

    def __init__(self, folder: Path) -> None:
        self._bundle, self._runs = Bundle.open(folder, verify=False), list[Callable[[], Any]]()

    def load(self, names: Sequence[str]) -> float:
        """Seconds that making the sessions of ``names`` took; each has then run once."""
        files, options = self._bundle.manifest.targets["cpu"].graphs, ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads, options.enable_mem_pattern = 3, 1, False
        begin = time.perf_counter()
        paths = [str(self._bundle.path(files[name])) for name in names]
        sessions = [ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]) for path in paths]
        seconds = time.perf_counter() - begin
        self._runs += [_one_token(session) for session in sessions]
        self.run()
        return seconds

    def run(self) -> None:
        for run in self._runs:
            run()


def _one_token(session: ort.InferenceSession) -> Callable[[], Any]:
    """Runs one token through a graph, in 64 slots of a cache of zeros."""
    feeds: dict[str, NDArray[Any]] = {}
    for value in session.get_inputs():
        shape = [d if isinstance(d, int) else 64 if d == "slots" else 1 for d in value.shape]
        feeds[value.name] = np.full(shape, value.name in ("total_sequence_length", "query_seqlens"), _DTYPES[value.type])
    return lambda: session.run(None, feeds)


def _memory() -> tuple[float, float]:
    """Proportional and private MiB of this process."""
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    sizes = {line[0]: int(line[1]) / 1024 for line in lines}
    return sizes["Pss:"], sizes["Private_Dirty:"]


def _hold(folder: Path, stages: Sequence[Sequence[str]], parent: Connection) -> None:
    """The body of a process: load stage after stage, send its memory after each, and once more on request."""
    graphs, seconds, before = LoadedGraphs(folder), 0.0, _memory()

    def tell() -> None:
        total, own = (now - then for now, then in zip(_memory(), before, strict=True))
        parent.send(Held(seconds, total, own))

    for names in stages:
        seconds += graphs.load(names)
        tell()
    parent.recv()
    tell()
    parent.recv()  # its pages are the other one's alone as soon as it ends


def measure(folder: Path, stages: Sequence[Sequence[str]]) -> tuple[list[Held], float]:
    """What a process holds after each stage, and MiB of two such processes together."""
    context = get_context("spawn")
    pipes, alone = [context.Pipe() for _ in range(2)], list[Held]()
    for ours, theirs in pipes:
        context.Process(target=_hold, args=(folder, stages, theirs), daemon=True).start()
        theirs.close()  # else the end of a failed process would go unnoticed
        told = [ours.recv() for _ in stages]
        alone = alone or told
    for ours, _ in pipes:
        ours.send("again")
    together = sum(ours.recv().total for ours, _ in pipes)
    for ours, _ in pipes:
        ours.send("end")
    return alone, together


def step_ratio(packed: Path, plain: Path, segments: Sequence[str], packed_first: bool) -> float:
    """Time of a step on packed weights from the bundle over the time of one on ONNX Runtime's own; median over rounds."""
    folders = {"packed": packed, "plain": plain}
    arms = {name: LoadedGraphs(folders[name]) for name in sorted(folders, reverse=not packed_first)}
    for graphs in arms.values():
        graphs.load(segments)
    times: dict[str, list[float]] = defaultdict(list)
    for turn in range(_ROUNDS):
        for name in sorted(arms, reverse=bool(turn % 2)):
            arms[name].run()
            begin = time.perf_counter()
            for _ in range(_STEPS):
                arms[name].run()
            times[name].append(time.perf_counter() - begin)
    return median(a / b for a, b in zip(times["packed"], times["plain"], strict=True))


def _verify_seconds(folder: Path) -> float:
    begin = time.perf_counter()
    Bundle.open(folder)
    return time.perf_counter() - begin


def _size(folder: Path) -> float:
    return sum(file.bytes for file in read_manifest(folder).files.values()) / 2**20


def _compare(folders: dict[str, Path], stages: dict[str, list[str]], turns: int, report: Report) -> None:
    """Rows and figures of both bundles, which take turns, another one first each time."""
    held: dict[str, list[list[Held]]] = defaultdict(list)
    two: dict[str, list[float]] = defaultdict(list)
    verify: dict[str, list[float]] = defaultdict(list)
    for turn in range(turns):
        for name in sorted(folders, reverse=bool(turn % 2)):
            alone, together = measure(folders[name], list(stages.values()))
            held[name].append(alone)
            two[name].append(together)
            verify[name].append(_verify_seconds(folders[name]))
    for name in folders:
        for number, stage in enumerate(stages):
            seconds, total, own = (median(getattr(h[number], kind) for h in held[name]) for kind in ("seconds", "total", "own"))
            report.rows.append({"weights": name, "loaded": stage, "load_s": seconds, "mib": total, "own_mib": own})
        report.rows.append({"weights": name, "loaded": "all, by two processes", "mib": median(two[name])})
        report.add(f"{name}_segments_mib", median(h[0].total for h in held[name]))
        report.add(f"{name}_all_mib", median(h[-1].total for h in held[name]))
        report.add(f"{name}_two_processes_mib", median(two[name]))
        report.add(f"{name}_bundle_mib", _size(folders[name]))
        report.add(f"{name}_verify_s", median(verify[name]))
    report.add("load_ratio", median(a[-1].seconds / b[-1].seconds for a, b in zip(held["packed"], held["plain"], strict=True)))


def table(report: Report) -> Table:
    made = Table("weights", "loaded", "load s", "MiB", "own MiB", title=report.machine_line())
    for row in report.rows:
        numbers = (row.get("load_s"), row["mib"], row.get("own_mib"))
        load, total, own = ("" if n is None else f"{n:.{digits}f}" for n, digits in zip(numbers, (3, 1, 1), strict=True))
        made.add_row(row["weights"], row["loaded"], load, total, own)
    return made


def main(
    bundle: Annotated[Path, typer.Argument(help="A bundle in fp32 with packed weights, as tide-export writes it.")],
    turns: Annotated[int, typer.Option(help="How often each bundle is loaded.")] = 5,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Load and run a bundle with and without its packed weights, in turn."""
    manifest, report = read_manifest(bundle), Report("shared_weights", bundle=bundle.name, turns=turns)
    stages = stages_of(manifest)
    with tempfile.TemporaryDirectory(dir=bundle.parent) as temporary:
        plain = without_packed(bundle, Path(temporary, "plain"))
        _compare({"packed": bundle, "plain": plain}, stages, turns, report)
        ratios = [run_in_process(step_ratio, bundle, plain, stages["segments"], bool(turn % 2)) for turn in range(turns)]
    report.add("step_ratio", median(ratios))
    Console().print(table(report))
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
