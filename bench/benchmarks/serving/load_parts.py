"""A closed loop of clients, and requests that arrive at random: what is run, and what is reported of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from time import monotonic

from rich.progress import Progress
from tide_bench.report import Report

from benchmarks.serving.load import PERCENTILES, LengthMix, LoadRun, capacity, latency_row, requests, speed_ratio, with_arrivals
from benchmarks.serving.load_arms import LoadArm, LoadArms

CLOSED_MIX = LengthMix((64, 64), (64, 64))
OPEN_MIX = LengthMix((16, 900), (16, 96))
FEWEST_ROUNDS = 3
SEQUENCES, CONTEXT = 16, 1024  # sequences at once and tokens of each, for servers in an open loop
Rounds = list[dict[str, LoadRun]]


@dataclass(frozen=True)
class ClosedPart:
    """Arms that run in the same rounds, so that their ratios can be results.

    Args:
        share: of the time for all parts.
        requests: of a client in a round; a lone client sends at least two, which take a second or two.
    """

    share: float
    arms: tuple[LoadArm, ...]
    requests: int = 1


def run_closed(
    arms: LoadArms, parts: Sequence[ClosedPart], text: Sequence[int], seed: int, minutes: float, progress: Progress
) -> Rounds:
    """Rounds of every part, until its share of ``minutes`` is over. In a round all arms answer the same prompts, in an order of
    the round's own; no prompt comes twice."""
    rounds: Rounds = []
    for number, part in enumerate(parts):
        seconds = 60 * minutes * part.share
        bar = progress.add_task(f"closed loop, {max(arm.clients for arm in part.arms)} clients", total=seconds)
        for arm in part.arms:
            arms.closed(arm, requests(text, CLOSED_MIX, max(2, arm.clients), [seed, number, 0]))  # warm-up
        begin = monotonic()
        done = 0
        while done < FEWEST_ROUNDS or monotonic() - begin < seconds:
            done += 1
            one = {}
            for arm in Random(f"{seed} {number} {done}").sample(part.arms, len(part.arms)):
                count = max(2, part.requests * arm.clients)
                one[arm.name] = arms.closed(arm, requests(text, CLOSED_MIX, count, [seed, number, done]))
            rounds.append(one)
            progress.update(bar, completed=min(seconds, monotonic() - begin))
        progress.update(bar, completed=seconds)
    return rounds


def report_closed(
    rounds: Rounds, parts: Sequence[ClosedPart], ratios: Mapping[str, tuple[str, str]], title: str, report: Report
) -> None:
    """Tables of arms and of ``ratios`` (result → arm, baseline), and their results."""
    shown = []
    for arm in sorted((arm for part in parts for arm in part.arms), key=lambda arm: arm.clients):
        runs = [one[arm.name] for one in rounds if arm.name in one]
        rows = [latency_row(run) for run in runs]
        row = {name: median(one[name] for one in rows) for name in rows[0]}
        cpu = median(run.client_cpu_s / run.seconds for run in runs)
        report.rows.append(
            {"part": "closed", "arm": arm.name, "title": arm.title, "weights": arm.weights, "clients": arm.clients, **row}
            | {"rounds": len(runs), "speeds": [run.tokens_per_s for run in runs]}
            | ({"client_cpu": cpu} if arm.over_http else {})
        )
        report.add(f"tokens_per_s_{arm.name}", row["tokens_per_s"])
        cells = [str(arm.clients), arm.title, arm.weights, f"{row['tokens_per_s']:.0f}", _latencies(row, "ttft", (50, 95))]
        shown.append([*cells, _latencies(row, "itl", digits=1), f"{cpu:.1%}" if arm.over_http else ""])
    report.table(
        title,
        ["clients", "arm", "weights", "tokens/s", "first token, p50 / p95", "between tokens, p50 / p95 / p99", "client CPU"],
        shown,
        "SmolLM2-135M-Instruct, clients that send their next request after an answer, 64-token prompts, 64 new tokens, greedy. "
        "Percentiles in ms, medians of rounds. Client CPU: the clients' process, over one core; other clients are threads of the "
        "engine's.",
    )
    compared = []
    for name, (arm_name, baseline) in ratios.items():
        ratio = speed_ratio(rounds, arm_name, baseline)
        if ratio is not None:
            report.add(name, ratio.median)
            compared.append([arm_name, baseline, f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"])
    report.table("Ratios of tokens/s", ["arm", "over", "median (95%)"], compared, "paired by round.")


def run_open(
    arms: LoadArms,
    ours: LoadArm,
    theirs: LoadArm,
    shares: Sequence[int],
    text: Sequence[int],
    seed: int,
    seconds: float,
    report: Report,
    progress: Progress,
) -> None:
    """The same requests at the same times for both arms. ``shares``: of what ``ours`` can serve, in percent; ``seconds``: of
    arrivals at each of these rates."""
    bar = progress.add_task("Poisson arrivals", total=2 * (1 + len(shares)))
    most = dict[str, float]()
    both = (ours, theirs)
    for arm in both:
        arms.closed(arm, requests(text, OPEN_MIX, SEQUENCES, seed))  # warm-up
        most[arm.label] = capacity(arms.closed(arm, requests(text, OPEN_MIX, 4 * SEQUENCES, seed + 1)).served, SEQUENCES)
        report.add(f"capacity_{arm.label}", most[arm.label])
        progress.advance(bar)
    report.add("capacity_vs_llamacpp", most[ours.label] / most[theirs.label])
    shown = []
    for number, share in enumerate(shares):
        rate = most[ours.label] * share / 100
        planned = with_arrivals(requests(text, OPEN_MIX, max(2, round(rate * seconds)), seed + 2 + number), rate, seed)
        rows = {}
        for arm in both if number % 2 else both[::-1]:
            row = latency_row(arms.open(arm, planned))
            own = rate / most[arm.label]
            rows[arm.label] = row
            place = {"part": "open", "share": share, "rate": rate, "own_load": own}
            report.rows.append(place | {"arm": arm.name, "title": arm.title, "weights": arm.weights} | row)
            report.add(f"itl_p99_over_p50_{arm.label}_at_{share}", row["itl_ms_p99"] / row["itl_ms_p50"])
            cells = [f"{share}%", f"{own:.0%}", f"{rate:.2f}", arm.title, arm.weights, f"{row['tokens_per_s']:.0f}"]
            shown.append([*cells, _latencies(row, "ttft"), _latencies(row, "itl")])
            progress.advance(bar)
        first = [rows[arm.label]["ttft_ms_p95"] for arm in both]
        report.add(f"ttft_ms_p95_{ours.label}_at_{share}", first[0])
        report.add(f"ttft_p95_vs_llamacpp_at_{share}", first[1] / first[0])
    report.table(
        "Requests that arrive at random",
        ["load", "own load", "requests/s", "arm", "weights", "tokens/s", "first token", "between tokens"],
        shown,
        "Poisson arrivals, prompts of 16 to 900 tokens, 16 to 96 new tokens. Load: the rate over TIDE's capacity, and over the "
        "arm's own; where that is above 100%, its queue grows until the arrivals end. Percentiles 50 / 95 / 99 in ms.",
    )


def _latencies(row: Mapping[str, float], kind: str, percentiles: Sequence[int] = PERCENTILES, digits: int = 0) -> str:
    return " / ".join(f"{row[f'{kind}_ms_p{q}']:.{digits}f}" for q in percentiles)
