"""What does cutting cost? One decode step through 1, 2, 4, 6 segments against the same step through the unsplit graph.

The unsplit graph is a bundle that is cut nowhere, so "1 segment" is the same once more, with its weights elsewhere in
memory: how far its ratio is from 1 is how far the others may be off. Where weights happen to lie is worth a few percent, so
everything is loaded several times (``--loads``), another arm first. All arms run with the runtime's own loop, caches and
bindings, in turn, in one process; a ratio is the median over rounds of (segments' time / unsplit's time of the same round).
``--pool shared`` is what TIDE's commands use: one thread pool for all sessions. ``--pool own`` is the default for
embedding: each session has its pool; the unsplit graph then gets ONNX Runtime's own defaults, which suit one graph best.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import onnxruntime as ort
import typer
from rich.console import Console
from rich.table import Table
from tide_bench.report import Report
from tide_runtime.backends.base import Backend, Step
from tide_runtime.backends.onnxruntime.cpu import OnnxRuntimeBackend
from tide_runtime.backends.onnxruntime.threads import ThreadOptions
from tide_runtime.bundle import Bundle

from benchmarks.models.demo import BENCH_MODELS
from benchmarks.models.even_cuts import write_even_cuts

START = 128  # cache slots filled before the timed steps
SEGMENTS = (1, 2, 4, 6)
UNSPLIT = "unsplit"
SEQS = (1, 4)  # tokens of the timed steps: decoding, and verifying three drafts


@dataclass(frozen=True)
class Arm:
    """A backend and the graphs that one step launches."""

    backend: Backend
    graphs: tuple[str, ...]


def load_arms(directory: Path, threads: ThreadOptions, turn: int) -> dict[str, Arm]:
    """Every arm, the ``turn``-th first: what a process loads first is some percent faster."""
    names = [UNSPLIT, *map(str, SEGMENTS)]
    shift = turn % len(names)
    loaded = {name: _load_arm(directory, threads, name) for name in names[shift:] + names[:shift]}
    return {name: loaded[name] for name in names}


def _load_arm(directory: Path, threads: ThreadOptions, name: str) -> Arm:
    bundle = Bundle.open(directory / f"segments_{1 if name == UNSPLIT else name}", verify=False)
    if name == UNSPLIT and not threads.shared:
        return Arm(_with_defaults(bundle), _segments(bundle))
    return Arm(OnnxRuntimeBackend.load(bundle, "cpu", threads), _segments(bundle))


def _with_defaults(bundle: Bundle) -> OnnxRuntimeBackend:
    """A bundle's graphs in sessions with ONNX Runtime's default options."""
    files, layers = (
        bundle.manifest.targets["cpu"].graphs,
        {s.name: bundle.manifest.model.num_layers for s in bundle.manifest.segments},
    )
    pads_attention = bundle.manifest.targets["cpu"].pads_attention

    def load(name: str) -> ort.InferenceSession:
        return ort.InferenceSession(str(bundle.path(files[name])))

    return OnnxRuntimeBackend(bundle.manifest, layers, load, pads_attention=pads_attention)


def _segments(bundle: Bundle) -> tuple[str, ...]:
    return tuple(segment.name for segment in bundle.manifest.segments)


def time_step(step: Step, graphs: tuple[str, ...], steps: int) -> float:
    """Median ms of ``steps`` decode steps, each one token further."""
    times = []
    for i in range(steps + 3):
        begin = time.perf_counter()
        step.place([START + i % 64])
        for graph in graphs:
            step.run(graph)
        times.append(time.perf_counter() - begin)
    return float(np.median(times[3:])) * 1e3


def measure(arms: dict[str, Arm], seq: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """ms per step of every arm in every round; the order turns so that no arm always follows the same one."""
    prepared = {name: arm.backend.context(1).step(0, [seq], [seq]) for name, arm in arms.items()}
    names = list(arms)
    results: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            time.sleep(0.02)  # let the threads of the arm before stop spinning
            results[name].append(time_step(prepared[name], arms[name].graphs, steps))
    return results


def main(
    models: Annotated[str, typer.Option(help="Comma-separated: llama12x512, demo.")] = "llama12x512,demo",
    pool: Annotated[str, typer.Option(help="shared (as TIDE's commands run) or own (as embedded by default).")] = "shared",
    loads: Annotated[int, typer.Option(help="How often everything is loaded anew, another arm first.")] = 5,
    rounds: Annotated[int, typer.Option(help="Rounds in which every arm runs once, per load.")] = 5,
    steps: Annotated[int, typer.Option(help="Decode steps per arm and round.")] = 40,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure the segment tax."""
    report = Report("segment_tax", pool=pool, loads=loads, rounds=rounds, steps=steps, start=START)
    table = Table(
        "model",
        "S",
        "unsplit ms",
        *(f"{n} segments" for n in SEGMENTS),
        title=f"time over the unsplit graph's, {pool} thread pool",
    )
    with tempfile.TemporaryDirectory() as temporary:
        for model in models.split(","):
            write_even_cuts(BENCH_MODELS[model](), Path(temporary) / model, SEGMENTS, max_seq_len=512)
        for model in models.split(","):
            times: dict[int, dict[str, list[float]]] = {seq: {} for seq in SEQS}
            for turn in range(loads):
                arms = load_arms(Path(temporary) / model, ThreadOptions(shared=pool == "shared"), turn)
                for seq in SEQS:
                    for name, measured in measure(arms, seq, rounds, steps).items():
                        times[seq].setdefault(name, []).extend(measured)
                del arms
            for seq in SEQS:
                table.add_row(model, str(seq), *_record(report, model, seq, times[seq]))
    Console().print(table)
    report.finish(json)


def _record(report: Report, model: str, seq: int, times: dict[str, list[float]]) -> list[str]:
    base = np.array(times[UNSPLIT])
    prefix = ("" if model == "llama12x512" else f"{model}_") + "segment_tax"
    cells = [f"{np.median(base):.3f}"]
    report.add(f"{prefix}_unsplit_ms_s{seq}", float(np.median(base)))
    for count in SEGMENTS:
        ratios = np.array(times[str(count)]) / base
        low, middle, high = np.percentile(ratios, (25, 50, 75))
        report.add(f"{prefix}_{count}_s{seq}", float(middle))
        cells.append(f"{middle:.3f} ({low:.3f}–{high:.3f})")
    return cells


if __name__ == "__main__":
    typer.run(main)
