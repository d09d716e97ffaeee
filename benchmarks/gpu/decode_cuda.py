"""How fast do models decode on a GPU? TIDE's segments against the unsplit graph, HuggingFace eager and `torch.compile`.

Every arm decodes greedily after the same prompts; arms are timed in turns, medians are shown. ``vs_unsplit`` is the unsplit
graph's time over the segments' (below 1: cutting costs), ``vs_eager`` eager's over theirs. Tokens are held against eager's, in
fp32 for the demo model. Without a GPU everything is made up to the launch and nothing runs (exit code 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from tide_bench.arms.base import Timing
from tide_bench.build_cache import cached_folder
from tide_bench.report import Report
from tide_runtime.bundle import Bundle
from tide_runtime.errors import TargetError

from benchmarks.gpu.absent_gpu import say_not_run
from benchmarks.gpu.decode_arms import TideArm, TorchArm
from benchmarks.gpu.model_shapes import MAX_SEQ_LEN, SHAPES, ModelShape
from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.progress import ExportProgress

CACHE = Path("build") / "decode_cuda"
_PROMPT, _BANDWIDTH = 64, 4.3e12  # tokens; bytes/s of a copy on an H200, for the table of what would run
ARMS = ("eager", "compile", "unsplit", "tide")
_CUTS = {"unsplit": "none", "tide": "auto"}


def bundle(shape: ModelShape, dtype: str, arm: str, cache: Path) -> Path:
    """The bundle of an arm, made once."""
    checkpoints = _CUTS[arm]

    def make(folder: Path) -> None:
        (folder / "bundle").mkdir()
        config = ExportConfig(dtype, checkpoints, MAX_SEQ_LEN, targets=("cuda",), verify=False)
        write_bundle(shape.load(dtype), folder / "bundle", config, ExportProgress(quiet=True))

    return cached_folder(cache / f"{shape.name}_{dtype}_{arm}", f"{shape} {dtype} {checkpoints}", make) / "bundle"


def prompts(shape: ModelShape, rows: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(3, shape.config().vocab_size, (rows, _PROMPT)).tolist()


def load_arm(name: str, shape: ModelShape, dtype: str, rows: int, cache: Path) -> Any:
    if name in _CUTS:
        return TideArm(bundle(shape, dtype, name, cache), "cuda", rows)
    return TorchArm(shape.load(dtype).model, MAX_SEQ_LEN, compiled=name == "compile")


def measure(shape: ModelShape, dtype: str, rows: int, new_tokens: int, repeats: int, cache: Path) -> dict[str, Any]:
    """Arm → median ms a step, tokens/s, share of tokens as eager's, host ms a step; or why it could not run."""
    given, timings = prompts(shape, rows), dict[str, list[Timing]]()
    found: dict[str, Any] = {}
    for name in ARMS:  # two copies of an 8B model and its caches fit, but four do not: one arm after the other
        arm = load_arm(name, shape, dtype, rows, cache)
        arm.generate(given, new_tokens)  # compiles, captures, allocates
        timings[name] = [arm.generate(given, new_tokens) for _ in range(repeats)]
        found[name] = _figures(timings[name], timings["eager"][0].tokens, rows)
        if isinstance(arm, TideArm):
            found[name]["host_ms_per_token"] = arm.host_ms(given, new_tokens)
        arm.close()
    return found


def _figures(timings: list[Timing], reference: list[list[int]], rows: int) -> dict[str, float]:
    ms = median(timing.decode_ms_per_token for timing in timings)
    same = np.mean(np.array(timings[-1].tokens) == np.array(reference))
    return {"ms_per_token": ms, "tokens_per_s": 1e3 * rows / ms, "as_eager": float(same)}


def cases(models: str, batch: str) -> Iterator[tuple[ModelShape, str, int]]:
    for name in models.split(","):
        if name not in SHAPES:
            raise typer.BadParameter(f"there is no model {name!r}; choose from: {', '.join(SHAPES)}")
        for dtype in SHAPES[name].dtypes:
            for rows in batch.split(","):
                yield SHAPES[name], dtype, int(rows)


def prepare(models: str, batch: str, cache: Path) -> str:
    """Everything up to the launches; of the bundles, one of the demo model is made. Returns what was done."""
    table = Table("model", "dtype", "rows", "GB a step", f"ms at {_BANDWIDTH / 1e12} TB/s", title="to run")
    made = ""
    for shape, dtype, rows in cases(models, batch):
        count = shape.step_bytes(dtype, rows, 2 * _PROMPT)
        table.add_row(shape.name, dtype, str(rows), f"{count / 1e9:.2f}", f"{1e3 * count / _BANDWIDTH:.3f}")
        if not shape.layers and not made:
            made = f"the demo model was exported to {Bundle.open(bundle(shape, dtype, 'tide', cache)).directory}; "
    Console().print(table)
    return f"{made}no model was loaded on a GPU, run or timed"


def main(
    models: Annotated[str, typer.Option(help=f"Of {','.join(SHAPES)}.")] = ",".join(SHAPES),
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8,32",
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens a row.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repetitions of each arm.")] = 5,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Compare decode speed on a GPU. Exit code 2: not run."""
    if not torch.cuda.is_available():
        reason = TargetError(f"torch {torch.__version__} sees no GPU; install a build for CUDA")
        say_not_run(reason, prepare(models, batch, cache))
    report = Report("decode_cuda", gpu=torch.cuda.get_device_name(), models=models, batch=batch, new_tokens=new_tokens)
    for shape, dtype, rows in cases(models, batch):
        record(report, f"{shape.name}_{dtype}_b{rows}", measure(shape, dtype, rows, new_tokens, repeats, cache))
    Console(width=140).print(results_table(report))
    report.finish(json)


def record(report: Report, case: str, arms: dict[str, dict[str, float]]) -> None:
    """A row, and RESULT lines: each arm's figures, and TIDE's ratios."""
    tide = arms["tide"]["ms_per_token"]
    ratios = {f"vs_{name}": arms[name]["ms_per_token"] / tide for name in ARMS if name != "tide"}
    report.rows.append({"case": case, "arms": arms, **ratios})
    for name, figures in arms.items():
        for figure, value in figures.items():
            report.add(f"{case}_{name}_{figure}", value)
    for name, value in ratios.items():
        report.add(f"{case}_{name}", value)


def results_table(report: Report) -> Table:
    table = Table("case", *(f"{name} ms/token" for name in ARMS), "tokens/s", "× unsplit", "× eager", "as eager", "host ms/token")
    for row in report.rows:
        arms, tide = row["arms"], row["arms"]["tide"]
        table.add_row(
            row["case"],
            *(f"{arms[name]['ms_per_token']:.3f}" for name in ARMS),
            f"{tide['tokens_per_s']:.0f}",
            f"{row['vs_unsplit']:.2f}",
            f"{row['vs_eager']:.2f}",
            f"{tide['as_eager']:.1%}",
            f"{tide['host_ms_per_token']:.3f}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
