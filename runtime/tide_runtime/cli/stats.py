"""``tide-run --stats``: where the tokens of one request came from, and what was launched for them."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tide_runtime.engine import Engine
from tide_runtime.results import Generation


def print_stats(engine: Engine, generation: Generation) -> None:
    """Tables on stderr: tokens by depth, drafts, launches, and the speed against the calibration's prediction."""
    console = Console(stderr=True)
    stats = generation.stats
    depths = Table("layers", "tokens", "share", title="Layers run before a token was said")
    for layers, count in stats.depths(engine.depth).items():
        depths.add_row("0 (copied)" if layers == 0 else str(layers), str(count), f"{count / stats.new_tokens:.0%}")
    console.print(depths)
    if stats.drafted:
        drafts = Table("drafter", "drafted", "accepted", "share", title=f"Drafts, {stats.deep_passes} deep passes")
        for name, drafted in stats.drafted.items():
            accepted = stats.accepted.get(name, 0)
            drafts.add_row(name, str(drafted), str(accepted), f"{accepted / drafted:.0%}")
        console.print(drafts)
    launches = Table("graph", "launches", title="Launches, prompt included")
    for graph, count in engine.backend.launches.items():
        launches.add_row(graph, str(count))
    console.print(launches)
    for line in _notes(engine, generation):
        console.print(line, style="dim", highlight=False)


def _notes(engine: Engine, generation: Generation) -> list[str]:
    notes, calibration, stats = [], engine.manifest.calibration, generation.stats
    if calibration is not None and calibration.costs is not None and stats.new_tokens > 1:
        costs = calibration.costs
        measured = costs.unsplit_ms * stats.tokens_per_second / 1e3
        predicted = calibration.predicted.get(stats.policy)
        expected = "" if predicted is None else f"; the calibration predicts {predicted:.2f} on average"
        notes.append(
            f"speed {measured:.2f} times the uncut model's {costs.unsplit_ms:.2f} ms per token, which was measured when "
            f"calibrating on {costs.machine}{expected}"
        )
    if stats.policy == "exit":
        if stats.forced:
            notes.append(f"{stats.forced} tokens stopped early only to keep the depth budget: no certificate covers this output")
        if stats.prompt_exits:
            notes.append(
                f"{stats.prompt_exits} of {stats.prompt_tokens} prompt tokens stopped early (prefill exit): no certificate "
                "covers this output"
            )
        if engine.options.depth.kv == "propagate":
            notes.append("keys and values of skipped layers were projected (kv propagate): no certificate covers this output")
        elif engine.options.depth.threshold is not None:
            notes.append(f"threshold {engine.options.depth.threshold} was set by hand: no certificate covers this output")
        elif not stats.forced and not stats.prompt_exits and calibration is not None and calibration.certificate is not None:
            c = calibration.certificate
            notes.append(f"certified: at most {c.max_disagreement:.1%} of tokens differ, with {c.confidence:.0%} confidence")
    return notes
