"""How much of decoding is Python: wall time outside the graphs, per token and as a share, for each policy on the demo models.

    python -m benchmarks.python_time                  # layerskip and stock, batch 1 and 8
    python -m benchmarks.python_time --models stock --prompts 4

Time in ONNX Runtime's sessions is the graphs'; everything else of decode steps is the runtime's own loop, and what watching costs
(a us a launch). `full` is the baseline: it runs as one graph, so its share is the least there can be. A policy that makes tokens
three times as fast with the same loop has three times the share, so the time is shown against a token of `full` as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated
from unittest.mock import patch

import onnxruntime as ort
import typer
from rich.console import Console
from rich.table import Table
from tide_bench.report import Report
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import DepthPolicy, PromptChunk
from tide_runtime.scheduling.step import run
from tide_runtime.sequence import TokenSequence

from benchmarks.arms.policy_list import POLICIES, PolicyArm
from benchmarks.held_out import held_out_prompts
from benchmarks.models.calibrated_bundles import calibrated_bundles
from benchmarks.policies_cpu import CACHE, PROMPT_TOKENS

MODELS = ("layerskip", "stock")
ARMS = ("full", "exact_ngram", "exact_router", "exact_both", "exit1")


@dataclass
class _Watch:
    """Seconds of decoding, and those of them inside graphs."""

    decoding: float = 0.0
    inside: float = 0.0

    @contextmanager
    def graphs(self) -> Iterator[None]:
        """Time what ONNX Runtime's sessions do."""
        run = ort.InferenceSession.run_with_iobinding

        def timed(session: ort.InferenceSession, binding: ort.IOBinding) -> None:
            began = perf_counter()
            run(session, binding)
            self.inside += perf_counter() - began

        with patch.object(ort.InferenceSession, "run_with_iobinding", timed):
            yield


class _WatchedPolicy:
    """A depth policy whose prompts do not count."""

    def __init__(self, policy: DepthPolicy, watch: _Watch) -> None:
        self.name, self.lookahead, self.settled = policy.name, policy.lookahead, policy.settled
        self._policy, self._watch = policy, watch

    def step(
        self, context: ExecutionContext, decoding: Sequence[TokenSequence], prompts: Sequence[PromptChunk]
    ) -> list[list[int]]:
        began, inside = perf_counter(), self._watch.inside
        tokens = self._policy.step(context, decoding, prompts)
        if prompts:
            self._watch.decoding -= perf_counter() - began
            self._watch.inside = inside
        return tokens


def python_time(bundle: Path, arm: PolicyArm, batch: int, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
    """Milliseconds of decoding per token of a sequence, and of these in Python."""
    options = EngineOptions(
        policy=arm.policy, depth=DepthOptions(draft=arm.draft), max_batch=batch, threads=ThreadOptions(shared=True), verify=False
    )
    params = GenerationParams(max_new_tokens=tokens, ignore_eos=True)
    watch = _Watch()
    with Engine.load(bundle, options) as engine, watch.graphs():
        policy, context = _WatchedPolicy(engine.policy, watch), engine.backend.context(batch)
        for _ in range(2):  # the first time binds every shape
            watch.decoding = watch.inside = 0.0
            began = perf_counter()
            for _ in run(policy, context, engine.admission.sequences(list(prompts), params)):
                pass
            watch.decoding += perf_counter() - began
    steps = len(prompts) * (tokens - 1) / min(batch, len(prompts))
    return watch.decoding / steps * 1e3, (watch.decoding - watch.inside) / steps * 1e3


def main(
    models: Annotated[str, typer.Option(help=f"Models, of {','.join(MODELS)}.")] = ",".join(MODELS),
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8",
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts of 64 tokens.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Greedy tokens of each.")] = 128,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure the runtime's own loop."""
    report = Report("python_time", models=models, batch=batch, prompts=prompts, tokens=tokens)
    given = [prompt.ids for prompt in held_out_prompts(prompts, PROMPT_TOKENS, "library")]
    console = Console()
    for model in models.split(","):
        bundle = calibrated_bundles(model, cache)[1]
        table = Table(
            "batch", "policy", "ms per token of all rows", "in Python", "share", "of full's token", "of full's", title=model
        )
        for size in (int(size) for size in batch.split(",")):
            full_ms = full_python_ms = 0.0
            for name in ARMS:
                with console.status(f"{model}: {name}, batch {size}"):
                    whole, python = python_time(
                        bundle, POLICIES[name], size, given[: max(size, len(given) // size * size)], tokens
                    )
                full_ms, full_python_ms = full_ms or whole, full_python_ms or python
                row = {
                    "model": model,
                    "batch": size,
                    "arm": name,
                    "ms": whole,
                    "python_ms": python,
                    "of_full_token": python / full_ms,
                    "python_of_full": python / full_python_ms,
                }
                report.rows.append(row)
                report.add(f"python_pct_{name}_{model}_b{size}", 100 * python / whole)
                report.add(f"python_pct_of_full_token_{name}_{model}_b{size}", 100 * python / full_ms)
                shares = [f"{python / whole:.1%}", f"{python / full_ms:.1%}", f"{python / full_python_ms:.2f}"]
                table.add_row(str(size), POLICIES[name].title, f"{whole:.2f}", f"{python * 1e3:.0f} us", *shares)
        console.print(table)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
