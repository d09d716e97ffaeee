"""Decode speed on a GPU: TIDE's segments against the unsplit graph, HuggingFace eager and `torch.compile`.

Every arm decodes greedily after the same prompts; medians over the repetitions are shown. Arms come one after the other, as four
copies of a large model do not fit beside each other; one that cannot run is a cell with the reason. ``over_unsplit`` is the
segments' time over the unsplit graph's (above 1: cutting costs), ``vs_eager`` eager's over theirs, ``as_eager`` the share of
tokens that are eager's. What of these is promised is checked on each row (`decode_promises`). Without a GPU everything is made
up to the launch and nothing runs (exit code 2). A model's bundles are deleted once it is measured.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from tide_bench.build_cache import cached_folder
from tide_bench.report import Report
from tide_runtime.bundle import Bundle
from tide_runtime.errors import TargetError

from benchmarks.gpu.absent_gpu import say_not_run
from benchmarks.gpu.decode_arms import COMPILED, DecodeArm, TideArm, TorchArm, release_memory
from benchmarks.gpu.decode_cases import ARMS, BATCHES, MODELS, DecodeCase, decode_cases
from benchmarks.gpu.decode_promises import complaints, verdicts
from benchmarks.gpu.gpu_report import executed, gpu_report
from benchmarks.gpu.model_shapes import MAX_SEQ_LEN, SHAPES, ModelShape, dtype_of
from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.load import LoadedModel
from tide_export.progress import ExportProgress

CACHE = Path("build") / "decode_cuda"
TARGET = "cuda"
_PROMPT, _BANDWIDTH = 64, 4.3e12  # tokens; bytes/s of a copy on an H200, for the table of what would run
_CUTS = {"unsplit": "none", "tide": "auto", "exact": "auto"}
Figures = dict[str, Any]  # of an arm; only ``note`` where it could not run


def bundle(shape: ModelShape, dtype: str, arm: str, cache: Path, load: Callable[[str], LoadedModel] | None = None) -> Path:
    """The bundle of an arm, made once. ``load``: gives the model by its dtype, instead of loading it anew."""
    checkpoints = _CUTS[arm]

    def make(folder: Path) -> None:
        (folder / "bundle").mkdir()
        config = ExportConfig(dtype_of(dtype), checkpoints, MAX_SEQ_LEN, targets=(TARGET,), verify=False)
        write_bundle((load or shape.load)(dtype), folder / "bundle", config, ExportProgress(quiet=True))

    return cached_folder(bundle_folder(shape, dtype, cache) / checkpoints, f"{shape} {dtype} {checkpoints}", make) / "bundle"


def bundle_folder(shape: ModelShape, dtype: str, cache: Path) -> Path:
    """Of all bundles of a model."""
    return cache / f"{shape.name}_{dtype}"


def prompts(case: DecodeCase) -> list[list[int]]:
    return np.random.default_rng(0).integers(3, case.shape.config().vocab_size, (case.rows, _PROMPT)).tolist()


def load_arm(case: DecodeCase, cache: Path, name: str) -> DecodeArm:
    if name in _CUTS:
        policy = "exact" if name == "exact" else "full"
        return TideArm(bundle(case.shape, case.dtype, name, cache), TARGET, case.rows, policy)
    return TorchArm(case.shape.load(case.dtype).model, MAX_SEQ_LEN, COMPILED if name == "compile" else None)


def measure(
    load: Callable[[str], DecodeArm], names: Sequence[str], given: list[list[int]], new_tokens: int, repeats: int
) -> dict[str, Figures]:
    """Arm → figures as of `arm_figures`, with the share of tokens as eager's; or, as ``note``, why it could not run."""
    found: dict[str, Figures] = {}
    for name in names:
        try:
            found[name] = arm_figures(load(name), given, new_tokens, repeats)
        except Exception as error:  # an arm that cannot run is a cell of the table, not the end of the benchmark
            found[name] = {"note": f"{type(error).__name__}: {error}".splitlines()[0]}
        finally:
            release_memory()
    compare_tokens(found)
    return found


def arm_figures(arm: DecodeArm, given: list[list[int]], new_tokens: int, repeats: int) -> Figures:
    """Median ms a step, tokens/s, host ms a step where it is counted, and the tokens [B][T]. Closes the arm."""
    try:
        arm.generate(given, new_tokens)  # compiles, captures, allocates
        timings = [arm.generate(given, new_tokens) for _ in range(repeats)]
        host_ms = arm.host_ms(given, new_tokens)
    finally:
        arm.close()
    ms, tokens = median(timing.decode_ms_per_token for timing in timings), timings[-1].tokens
    figures = {"ms_per_token": ms, "tokens_per_s": 1e3 * len(tokens) / ms, "tokens": tokens}
    return figures if host_ms is None else figures | {"host_ms_per_token": host_ms}


def compare_tokens(arms: dict[str, Figures]) -> None:
    """Replace each arm's tokens by the share of them that is eager's; nothing where eager did not run."""
    tokens = {name: figures.pop("tokens") for name, figures in arms.items() if "tokens" in figures}
    for name in tokens:
        if "eager" in tokens:
            arms[name]["as_eager"] = float(np.mean(np.array(tokens[name]) == np.array(tokens["eager"])))


def prepare(models: str, batch: str, cache: Path) -> str:
    """Everything up to the launches; of the bundles, one of the demo model is made. Returns what was done."""
    table = Table("model", "dtype", "rows", "GB a step", f"ms at {_BANDWIDTH / 1e12} TB/s", title="to run")
    made = ""
    for case in decode_cases(models, batch):
        count = case.shape.step_bytes(case.dtype, case.rows, 2 * _PROMPT)
        table.add_row(*map(str, case.key.values()), f"{count / 1e9:.2f}", f"{1e3 * count / _BANDWIDTH:.3f}")
        if not case.shape.layers and not made:
            made = f"the demo model was exported to {Bundle.open(bundle(case.shape, case.dtype, 'tide', cache)).directory}; "
    Console().print(table)
    return f"{made}no model was loaded on a GPU, run or timed"


def main(
    models: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = MODELS,
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = BATCHES,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens a sequence.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repetitions of each arm.")] = 5,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Compare decode speed on a GPU. Exit code 0, also where a promise is missed; 2: not run."""
    if not torch.cuda.is_available():
        reason = TargetError(f"torch {torch.__version__} sees no GPU; install a build for CUDA")
        say_not_run(reason, prepare(models, batch, cache))
    report = gpu_report("decode_cuda", torch.cuda.get_device_name(), models=models, batch=batch, new_tokens=new_tokens)
    for (shape, dtype), cases in groupby(decode_cases(models, batch), key=lambda case: (case.shape, case.dtype)):
        for case in cases:
            record(report, case, measure(partial(load_arm, case, cache), case.arms, prompts(case), new_tokens, repeats))
            if json is not None:
                report.write(json)  # large models take long: a run that is cut short keeps what it has
        shutil.rmtree(bundle_folder(shape, dtype, cache), ignore_errors=True)
    Console(width=140).print(results_table(report))
    print("\n".join(remarks(report)))
    report.add("promises_missed", sum(not kept for row in report.rows for kept in verdicts(row).values()))
    report.finish(json)


def record(report: Report, case: DecodeCase, arms: dict[str, Figures]) -> None:
    """A row, and RESULT lines: each arm's figures, TIDE's ratios, and 1 or 0 for what is promised of them."""
    ratios = _ratios(arms)
    row = {"case": case.name, **case.key, "arms": arms, **ratios}
    report.rows.append(row)
    if any("note" not in arms[name] for name in _CUTS if name in arms):
        executed(report, TARGET)
    for name, figures in arms.items():
        for figure, value in figures.items():
            if figure != "note":
                report.add(f"{case.name}_{name}_{figure}", value)
    for name, value in ratios.items():
        report.add(f"{case.name}_{name}", value)
    for figure, kept in verdicts(row).items():
        report.add(f"{case.name}_{figure}_kept", kept)


def _ratios(arms: dict[str, Figures]) -> dict[str, float]:
    """Ratios of the arms that ran: ``vs_eager`` and ``vs_compile``, ``over_unsplit``, and TIDE's ``as_eager``."""
    ms = {name: figures["ms_per_token"] for name, figures in arms.items() if "ms_per_token" in figures}
    if "tide" not in ms:
        return {}
    ratios = {f"vs_{name}": ms[name] / ms["tide"] for name in ("eager", "compile") if name in ms}
    if "unsplit" in ms:
        ratios["over_unsplit"] = ms["tide"] / ms["unsplit"]
    if "exact" in ms:
        ratios["exact_vs_full"] = ms["tide"] / ms["exact"]
    return ratios | {"as_eager": arms["tide"]["as_eager"]} if "eager" in ms else ratios


def results_table(report: Report) -> Table:
    table = Table("case", *(f"{arm} ms/token" for arm in ARMS), "tokens/s", "÷ unsplit", "× eager", "as eager", "host ms/token")
    for row in report.rows:
        tide = row["arms"]["tide"]
        table.add_row(
            row["case"],
            *(_shown(row["arms"].get(arm, {}), "ms_per_token", ".3f") for arm in ARMS),
            _shown(tide, "tokens_per_s", ".0f"),
            _shown(row, "over_unsplit", ".3f"),
            _shown(row, "vs_eager", ".2f"),
            _shown(row, "as_eager", ".1%"),
            _shown(tide, "host_ms_per_token", ".3f"),
        )
    return table


def _shown(figures: Figures, name: str, form: str) -> str:
    return format(figures[name], form) if name in figures else "–"


def remarks(report: Report) -> list[str]:
    """Lines on what could not run, and on promises that are missed."""
    failed = [
        f"{row['case']}: {arm} could not run: {figures['note']}"
        for row in report.rows
        for arm, figures in row["arms"].items()
        if "note" in figures
    ]
    return failed + [f"{row['case']}: {line}" for row in report.rows for line in complaints(row)]


if __name__ == "__main__":
    typer.run(main)
