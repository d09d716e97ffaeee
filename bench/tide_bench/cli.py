"""``tide-bench``: the depth policies of a bundle against other ways to run its model, on this machine."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from tide_runtime.bundle import Bundle
from tide_runtime.cli.errors import run_app
from tide_runtime.cli.form import APP, COMMAND, with_options
from tide_runtime.errors import ParamsError
from tide_runtime.targets.target_choice import AUTO

from tide_bench.arms import OTHER_ARMS, POLICIES
from tide_bench.bench_run import Bench
from tide_bench.config import BASELINES, BenchConfig, default_rivals
from tide_bench.device_choice import choose_device
from tide_bench.report import Phases, Report, phase_lines
from tide_bench.results import add_results, add_tables
from tide_bench.tables import console

app = typer.Typer(**APP)
_DEFAULTS = BenchConfig()


def _list(values: tuple[Any, ...]) -> str:
    return ",".join(map(str, values))


@app.command(**COMMAND)
@with_options(bits="prompts")
def bench(
    bundle: Annotated[Path, typer.Argument(help="The bundle's directory, as `tide-export --out` wrote it.")],
    *,
    model: Annotated[
        str | None, typer.Option(help="The HuggingFace model it was made from. Default: the one its manifest names.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="What all arms run on: cpu, cuda, cuda:1; auto: the GPU where there is one.")
    ] = AUTO,
    target: Annotated[
        str, typer.Option(help="The bundle's targets to compare, the main one first. Default: all that run on the device.")
    ] = "",
    vs: Annotated[
        str | None,
        typer.Option(
            help=f"Other ways to run the model, of {_list(tuple(OTHER_ARMS))}. Default: those of the device that round nothing."
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help=f"Depth policies, of {_list(tuple(POLICIES))}.")] = _list(_DEFAULTS.policies),
    prompts: Annotated[
        Path | None, typer.Option(help="A prompt a line, or .jsonl with `prompt` or `ids`. Default: Python's library.")
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="The model's GGUF file, for llamacpp and openvino. Default: the bundle's source.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Sequences at once.")] = _list(_DEFAULTS.batches),
    prompt_tokens: Annotated[str, typer.Option(help="Prompts are cut to their last so many tokens.")] = _list(
        _DEFAULTS.prompt_tokens
    ),
    config: BenchConfig,
    long: Annotated[bool, typer.Option("--long", help="Prompts of half and of all of the cache as well.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Where graphs of other arms are kept. Default: ~/.cache/tide-bench.")] = None,
) -> None:
    """Compare a bundle's depth policies with other ways to run its model: in turn, on the same prompts, outputs checked.

    Example: `tide-bench engine/ --device cuda --vs eager,cuda-graph --batch 1`
    """
    import psutil  # noqa: F401  # what the extra brings is missed here, and not after minutes

    begin = perf_counter()
    opened = Bundle.open(bundle, verify=False)
    place = choose_device(opened.manifest, device, _names(target))
    config = replace(
        config,
        device=place.kind,
        rivals=default_rivals(place.kind) if vs is None else _names(vs),
        baselines=BASELINES[place.kind],
        policies=_names(policy),
        batches=_numbers(batch, "--batch"),
        prompt_tokens=_numbers(prompt_tokens, "--prompt-tokens"),
    )
    report = Report(
        "tide_bench", model=opened.manifest.model.name, bundle=bundle.name, long=long, targets=place.targets, **asdict(config)
    )
    if place.gpu:
        report.machine["gpu"] = place.gpu
    phases = Phases(lambda text: console().print(text, style="dim", markup=False))
    with Bench(opened, config, place, model, prompts, cache or _default_cache(), long, phases, gguf) as run:
        report.rows = run.rows()
        add_tables(report)
    add_results(report)
    report.add("bench_seconds", perf_counter() - begin)
    report.settings["phases"] = phases.seconds
    for line in phase_lines(phases.seconds):
        console().print(line, style="dim", markup=False)
    report.finish(json)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ParamsError(f"{option} is {text!r}; give numbers separated by commas") from None


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tide-bench"


def main() -> None:
    """Entry point of ``tide-bench``."""
    run_app(app, command="tide-bench", extra="bench")


if __name__ == "__main__":
    main()
