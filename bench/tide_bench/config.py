"""The settings of a comparison; the command line takes its defaults from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tide_runtime.engine_options import BITS
from tide_runtime.errors import ParamsError
from tide_runtime.option import check_choices, option

from tide_bench.arms import CPU, CUDA, OTHER_ARMS, POLICIES

MODES = ("decode", "prefill")
# Eager decoding on a GPU waits for Python: a graph of the same kernels does not.
BASELINES = {CPU: ("eager", "unsplit"), CUDA: ("eager", "cuda-graph", "unsplit")}


def default_rivals(device: str) -> tuple[str, ...]:
    """Other ways to run a model on ``device`` (`cpu` or `cuda`) that round nothing."""
    return tuple(name for name, arm in OTHER_ARMS.items() if arm.promise != "rounded" and device in arm.devices)


@dataclass(frozen=True)
class BenchConfig:
    """Options of one comparison.

    Args:
        device: ``cpu`` or ``cuda``: what all arms run on.
        rivals: other ways to run the model, names of `OTHER_ARMS` that run there, see `default_rivals`. Names are
            keys of kept results.
        policies: depth policies of the bundle; those that it cannot run are left out with the reason.
        batches: sequences at once.
        prompt_tokens: lengths of prompts.
        minutes: each arm has `FEWEST_ROUNDS` turns even when that takes longer.
        precision: half the width of every ratio's 95% interval, relative to it.
        pivot: the arm that is in memory together with every other one, and whose texts theirs are compared with.
        baselines: arms over which the speed of the others is given; the first one that ran decides when turns may end.
    """

    device: str = CPU
    rivals: tuple[str, ...] = default_rivals(CPU)
    policies: tuple[str, ...] = tuple(POLICIES)
    bits: str = option(BITS[0], f"Of TIDE's arms: {','.join(BITS)}; see `tide-run --help`.")
    batches: tuple[int, ...] = (1, 8)
    prompt_tokens: tuple[int, ...] = (64,)
    new_tokens: int = option(64, "New tokens a sequence.")
    rounds: int = option(12, "Turns of each arm at most.")
    minutes: float = option(2.0, "Time for all turns together; preparing arms comes on top.")
    precision: float = option(0.02, "End the turns early once every ratio is known to within this share of it.")
    mode: str = option("decode", f"Of {','.join(MODES)}: tokens after the first; time to the first.", one_of=MODES)
    pivot: str = "full"
    baselines: tuple[str, ...] = BASELINES[CPU]

    def __post_init__(self) -> None:
        check_choices(self)
        here = {name: arm for name, arm in OTHER_ARMS.items() if self.device in arm.devices}
        _known(self.rivals, here, f"on {self.device}, --vs")
        _known(self.policies, POLICIES, "--policy")
        _known((self.bits,), dict.fromkeys(BITS), "--bits")
        for name, least in (("batches", 1), ("prompt_tokens", 1)):
            values = getattr(self, name)
            if not values or min(values) < least:
                raise ParamsError(f"{name} is {values}; give numbers of at least {least}")
        for name, least in (("new_tokens", 2), ("rounds", 1), ("minutes", 0), ("precision", 0)):
            if getattr(self, name) < least:
                raise ParamsError(f"{name} is {getattr(self, name)}; give at least {least}")


def _known(names: tuple[str, ...], known: Mapping[str, object], option: str) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ParamsError(f"{option} has {', '.join(unknown)}; choose from: {', '.join(known)}")
