"""Whether device-driven decoding generates the host's tokens: one CUDA graph for many tokens against the host's loop.

Policies `full` and `exit`, the latter with two exits that half of the tokens take each (`stub_exits`), one condition inside
the other; whole texts, and texts that an EOS token ends in the middle of a launch. In fp16 with ONNX Runtime, whose fp32
attention needs the host; in fp32 with TensorRT's engines, the only ones whose exits the device can evaluate: small differences
then decide about few tokens.
Exit code 0: the device drives everything and generates the same; 1: it does not; 2: not run, or not all of it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, cast

import numpy as np
import typer
from tide_bench.report import Report
from tide_plugins.launch.cuda_driver import CudaDriver
from tide_runtime import Engine, EngineOptions, GenerationParams
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.depth.policy import DepthPolicy
from tide_runtime.device_loop.policy import DrivenDepth
from tide_runtime.errors import TargetError
from tide_runtime.outputs import Generation, finished
from tide_runtime.scheduling.step import run

from benchmarks.gpu.absent_gpu import NOT_RUN, say_not_run
from benchmarks.gpu.gpu_report import executed, gpu_report
from benchmarks.gpu.loop_cases import LoopCase, Prompts, demo_prompts, engine_target, loop_cases, write_demo

_ROWS, _NEW, _ENDS = (1, 4), 96, 3  # sequences at once; new tokens; EOS tokens that are tried


def compare(engine: Engine, prompts: Prompts) -> dict[str, Any]:
    """Why the host drove (``reason``, None: it did not), texts that differ, ms a token, and the share of tokens that left early,
    and that took whichever way out was taken least.

    Tokens that come up for the first time at several places serve as EOS: they do not all stand at the end of a launch.
    """
    if engine.drive.reason is not None:
        return {"reason": engine.drive.reason}
    device, context = cast(DrivenDepth, engine.drive.policy), engine.backend.context(len(prompts))

    def generated(policy: DepthPolicy, *eos: int) -> list[Generation]:
        return generate(engine, context, policy, prompts, eos)

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        generated(device)  # its first launch is the host's, the others are the graph's
        whole = generated(device), generated(device.inner)
        ends = list(dict.fromkeys(whole[1][0].token_ids))[-_ENDS:]
        pairs = [whole, *((generated(device, end), generated(device.inner, end)) for end in ends)]
    refused = [str(warning.message) for warning in heard if "driven from the host" in str(warning.message)]
    texts = [(ours.token_ids, theirs.token_ids) for pair in pairs for ours, theirs in zip(*pair, strict=True)]
    depths = [depth for row in whole[0] for depth in row.stats.token_depths]
    ways = [*(exit.depth for exit in device.exits), engine.depth]
    return {
        "reason": refused[0] if refused else None,
        "texts": len(texts),
        "different": sum(ours != theirs for ours, theirs in texts),
        "device_ms_per_token": ms_per_token(whole[0]),
        "host_ms_per_token": ms_per_token(whole[1]),
        "left_early": float(np.mean(np.array(depths) < engine.depth)) if depths else 0.0,
        "least_taken": min(float(np.mean(np.array(depths) == way)) for way in ways) if depths else 0.0,
    }


def generate(
    engine: Engine, context: ExecutionContext, policy: DepthPolicy, prompts: Prompts, eos: tuple[int, ...]
) -> list[Generation]:
    """Over the same caches each time: what was captured belongs to them."""
    sequences = engine.admission.sequences(prompts, GenerationParams(max_new_tokens=_NEW, eos_token_ids=eos))
    for _ in run(policy, context, sequences):
        pass
    return [finished(sequence, policy.name, None) for sequence in sequences]


def ms_per_token(rows: list[Generation]) -> float:
    return max(1e3 * row.stats.decode_time / (row.stats.new_tokens - 1) for row in rows)


def complaint(case: LoopCase, row: dict[str, Any]) -> str | None:
    """What is wrong with a row; None: nothing."""
    if row["reason"] is not None:
        return f"the host drove: {row['reason']}"
    if row["different"]:
        return f"{row['different']} of {row['texts']} texts are not the host's"
    if case.policy == "exit" and row["least_taken"] == 0:
        return f"{row['left_early']:.0%} of the tokens left early, at some exit or at the end none: not every way out was tried"
    return None


def try_case(report: Report, case: LoopCase) -> None:
    """A row for each batch size; one that fails has the error as its reason."""
    with TemporaryDirectory() as folder:
        try:
            options = EngineOptions(target=case.target, policy=case.policy, max_batch=max(_ROWS))
            engine = Engine.load(write_demo(case, Path(folder)), options)
            found = {rows: compare(engine, demo_prompts(rows)) for rows in _ROWS}
        except Exception as error:  # TensorRT's and ONNX Runtime's own among them; the other cases are tried all the same
            found = {_ROWS[0]: {"reason": f"{type(error).__name__}: {error}"}}
    if any(row["reason"] is None for row in found.values()):
        executed(report, case.target)
    for rows, row in found.items():
        record(report, case, rows, row)


def record(report: Report, case: LoopCase, rows: int, row: dict[str, Any]) -> None:
    wrong = complaint(case, row)
    report.rows.append({"case": case.name, "rows": rows, "complaint": wrong, **row})
    print(f"{case.name}, {rows} rows: {wrong or 'the device drives, and generates the same'}")
    report.add(f"{case.name}_b{rows}_right", wrong is None)
    for figure, value in row.items():
        if figure != "reason":
            report.add(f"{case.name}_b{rows}_{figure}", value)


def prepare() -> str:
    with TemporaryDirectory() as folder:
        write_demo(loop_cases(None)[0], Path(folder))
    return "the demo model was exported with exits for target cuda; no loop was captured or launched"


def main(json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None) -> None:
    """Compare loops on the GPU with the host's."""
    try:
        gpu = CudaDriver().name
    except TargetError as reason:
        say_not_run(reason, prepare())
    report, engine = gpu_report("decode_loop", gpu), engine_target()
    for case in loop_cases(engine):
        try_case(report, case)
    wrong = sum(row["complaint"] is not None for row in report.rows)
    report.add("wrong", wrong)
    if engine is None:
        print("NOT RUN: policy exit, which needs engines for this GPU; pip install 'tide-llm[tensorrt]'")
    report.finish(json)
    raise typer.Exit(1 if wrong else NOT_RUN if engine is None else 0)


if __name__ == "__main__":
    typer.run(main)
