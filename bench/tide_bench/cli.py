"""``tide-bench``: the depth policies of a bundle against other ways to run its model, on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from tide_runtime import TideError
from tide_runtime.bundle import Bundle
from tide_runtime.cli.errors import run_app
from tide_runtime.engine_options import BITS
from tide_runtime.errors import ParamsError
from tide_runtime.targets.select import AUTO, CUDA
from tide_runtime.text.tokenizer import Tokenizer

from tide_bench.arm_folders import ArmFolders
from tide_bench.arm_pool import ArmPool, with_options
from tide_bench.arms import OTHER_ARMS, OURS, POLICIES, ArmSpec, in_bits, on_target, title_on
from tide_bench.arms.process import ArmError
from tide_bench.comparison import Comparison, Place
from tide_bench.config import BASELINES, MODES, BenchConfig, default_rivals
from tide_bench.counters import EnergyMeter, free_gpu_bytes
from tide_bench.curve import CurvePoint, measure_curve
from tide_bench.device_choice import BenchDevice, choose_device
from tide_bench.load_mode import load_rows
from tide_bench.output_checks import Terms
from tide_bench.prompts import joined, read_prompts, windows
from tide_bench.report import Phases, Report, phase_lines
from tide_bench.results import add_results, add_tables
from tide_bench.source_model import SourceModel, find_source
from tide_bench.tables import console

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
_DEFAULTS = BenchConfig()
_ROOMY = 8  # arms that fit into memory where two may get ready at once: making one may hold the model several times
_PROCESS_SHARE = 2.2  # memory of an arm over its fp32 weights: runtimes keep them packed for their kernels as well
_GPU_SHARE = 1.5  # GPU memory of an arm over its weights: caches and workspaces
_WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2}
LOAD_PROMPTS = 16
CURVE_TEXTS = 8


def _list(values: tuple[Any, ...]) -> str:
    return ",".join(map(str, values))


@app.command()
def bench(
    bundle: Annotated[Path, typer.Argument(help="The bundle's directory, as `tide-export --out` wrote it.")],
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
    bits: Annotated[str, typer.Option(help=f"Of TIDE's arms: {_list(BITS)}; see `tide-run --help`.")] = _DEFAULTS.bits,
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
    new_tokens: Annotated[int, typer.Option(help="New tokens a sequence.")] = _DEFAULTS.new_tokens,
    rounds: Annotated[int, typer.Option(help="Turns of each arm at most.")] = _DEFAULTS.rounds,
    minutes: Annotated[float, typer.Option(help="Time for all turns together; preparing arms comes on top.")] = _DEFAULTS.minutes,
    precision: Annotated[
        float, typer.Option(help="End the turns early once every ratio is known to within this share of it.")
    ] = _DEFAULTS.precision,
    mode: Annotated[
        str,
        typer.Option(help=f"Of {_list(MODES)}: tokens after the first; time to the first; requests at random times."),
    ] = _DEFAULTS.mode,
    rate: Annotated[str, typer.Option(help="Mode load: requests, as shares of what full can do.")] = _list(_DEFAULTS.rates),
    seconds: Annotated[float, typer.Option(help="Mode load: how long requests come.")] = _DEFAULTS.seconds,
    long: Annotated[bool, typer.Option("--long", help="Prompts of half and of all of the cache as well.")] = False,
    curve: Annotated[bool, typer.Option("--curve", help="Sweep the threshold of exit: cost against agreement.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report, index.html and its charts, into this folder.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Where graphs of other arms are kept. Default: ~/.cache/tide-bench.")] = None,
) -> None:
    """Compare a bundle's depth policies with other ways to run its model: in turn, on the same prompts, outputs checked.

    Example: `tide-bench engine/ --device cuda --vs eager,cuda-graph --batch 1 --html report/`
    """
    import psutil  # noqa: F401  # what the extra brings is missed here, and not after minutes

    if html is not None:
        from tide_bench.page import write_report
    begin = perf_counter()
    opened = Bundle.open(bundle, verify=False)
    place = choose_device(opened.manifest, device, _names(target))
    config = BenchConfig(
        mode=mode,
        device=place.kind,
        rivals=default_rivals(place.kind) if vs is None else _names(vs),
        baselines=BASELINES[place.kind],
        policies=_names(policy),
        bits=bits,
        batches=_numbers(batch, int, "--batch"),
        prompt_tokens=_numbers(prompt_tokens, int, "--prompt-tokens"),
        new_tokens=new_tokens,
        rounds=rounds,
        minutes=minutes,
        precision=precision,
        rates=_numbers(rate, float, "--rate"),
        seconds=seconds,
    )
    report = Report(
        "tide_bench", model=opened.manifest.model.name, bundle=bundle.name, long=long, targets=place.targets, **asdict(config)
    )
    if place.gpu:
        report.machine["gpu"] = place.gpu
    points: list[CurvePoint] = []
    phases = Phases(lambda text: console().print(text, style="dim", markup=False))
    with Bench(opened, config, place, model, prompts, cache or _default_cache(), long, phases, gguf) as run:
        report.rows = run.rows()
        add_tables(report)
        if run.meter.absent:
            console().print(f"No energy: {run.meter.absent}", style="dim", markup=False)
        report.settings["energy"] = run.meter.absent or "counted"
        if curve:
            points = run.curve()
    report.settings["curve"] = [asdict(point) for point in points]
    add_results(report)
    report.add("bench_seconds", perf_counter() - begin)
    report.settings["phases"] = phases.seconds
    for line in phase_lines(phases.seconds):
        console().print(line, style="dim", markup=False)
    if html is not None:
        console().print(f"report: {write_report(report, points, html)}", markup=False)
    report.finish(json)


class Bench:
    """One run of the command: what it needs, opened and closed together."""

    def __init__(
        self,
        bundle: Bundle,
        config: BenchConfig,
        device: BenchDevice,
        model: str | None,
        prompts: Path | None,
        cache: Path,
        long: bool,
        phases: Phases,
        gguf: Path | None = None,
    ) -> None:
        self.manifest, self.config, self.meter, self._device = bundle.manifest, config, EnergyMeter(), device
        info = bundle.manifest.tokenizer
        tokenizer = Tokenizer.from_file(bundle.path(info.file)) if info is not None else None
        self._prompts = read_prompts(prompts, tokenizer)
        self._lengths = _lengths(config, bundle.manifest.max_seq_len, long)
        self._phases = phases
        with phases("find the HuggingFace model"):
            source = _source(bundle, config, model)
        kinds = [spec.kind for spec in self._specs()]
        lanes = 2 if self._most_in_memory() >= _ROOMY else 1
        best = device.targets[0]
        folders = ArmFolders(bundle.directory, bundle.manifest, source, cache, kinds, self._exit_depth, gguf, best)
        self.pool = ArmPool(folders, lanes, phases, device.of_arms)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.close()

    def rows(self) -> list[dict[str, Any]]:
        """What the mode measures, a row for each arm and place."""
        if self.config.mode == "load":
            texts = [p for n in self._lengths for p in self._windows(n, LOAD_PROMPTS)]
            return load_rows(self.pool, self._specs(), texts, Terms.of(self.manifest), self.config, self._phases)
        places = [
            Place(length, batch, _groups(self._windows(length, batch * self.config.rounds), batch))
            for length in self._lengths
            for batch in sorted(self.config.batches)
        ]
        compared = Comparison(self.pool, self._specs(), places, self.manifest, self.config, self.meter, self._phases)
        return compared.run(self._most_in_memory())

    def curve(self) -> list[CurvePoint]:
        """The sweep; empty, with the reason printed, when the bundle has no exits."""
        length = self._lengths[0]
        texts = self._windows(length + self.config.new_tokens, CURVE_TEXTS)
        self.pool.stop_others(OURS)
        entries = self.pool.start([POLICIES["full"]])
        try:
            with self._phases("curve"):
                return measure_curve(entries[0].process, texts, length, self.meter)
        except (ArmError, IndexError) as error:
            console().print(f"No curve: {error}", style="yellow", markup=False)
            return []

    def _specs(self) -> list[ArmSpec]:
        best, *further = self._device.targets
        ours = [in_bits(POLICIES[name], self.config.bits) for name in dict.fromkeys(("full", *self.config.policies))]
        wanted = {one.name: replace(one, title=title_on(one, best)) if further else one for one in ours}
        wanted |= {one.name: one for target in further for one in (on_target(own, target) for own in ours)}
        wanted |= {name: OTHER_ARMS[name] for name in self.config.rivals}
        return list(with_options(wanted, self.manifest).values())

    def _windows(self, tokens: int, count: int) -> list[list[int]]:
        texts = self._prompts
        if all(len(text) < tokens for text in texts):
            texts = joined(texts, tokens)
        return windows(texts, tokens, count)

    def _exit_depth(self) -> int:
        """Mean layers that `exit` runs for a token: the depth that static layer skip is compared at."""
        entry = self.pool.running(POLICIES["exit"])
        prompts = self._windows(self._lengths[0], 4)
        depths = [entry.generate([prompt], self.config.new_tokens).depth or 0.0 for prompt in prompts]
        return max(1, min(round(sum(depths) / len(depths)), self.manifest.model.num_layers - 1))

    def _most_in_memory(self) -> int:
        import psutil  # `tide-bench --help` works without it

        need = 4 * self.manifest.model.parameters * _PROCESS_SHARE + 2**29  # libraries and buffers: half a GiB
        most = psutil.virtual_memory().available / need
        if self._device.kind == CUDA:
            free = free_gpu_bytes(self._device.choice.ordinal) or 0
            need = _WIDTH[self._device.dtype] * self.manifest.model.parameters * _GPU_SHARE + 2**30  # a context and its libraries
            most = min(most, free / need)
        return max(2, int(most))


def _source(bundle: Bundle, config: BenchConfig, model: str | None) -> SourceModel | str:
    if not config.rivals:
        return "not needed"
    try:
        return find_source(bundle.manifest.model, model)
    except TideError as error:
        return str(error)


def _lengths(config: BenchConfig, slots: int, long: bool) -> list[int]:
    """Prompt lengths; raises ParamsError when one does not fit into the cache with its new tokens."""
    room = slots - config.new_tokens
    lengths = sorted({*config.prompt_tokens, *((slots // 2, room) if long else ())})
    if lengths[-1] > room or lengths[0] < 1:
        raise ParamsError(f"prompts of {lengths[-1]} tokens and {config.new_tokens} new ones do not fit into {slots} cache slots")
    return lengths


def _groups(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(text: str, kind: Callable[[str], Any], option: str) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ParamsError(f"{option} is {text!r}; give numbers separated by commas") from None


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tide-bench"


def main() -> None:
    """Entry point of ``tide-bench``."""
    run_app(app, command="tide-bench", extra="bench")


if __name__ == "__main__":
    main()
