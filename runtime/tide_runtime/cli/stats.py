"""``tide-run --stats``: depths, drafts and launches of one request."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tide_runtime.engine import Engine
from tide_runtime.outputs import Generation, RequestStats


def print_stats(engine: Engine, generation: Generation) -> None:
    """Print tables on stderr: tokens by depth, drafts, launches, and the speed compared with the calibration's prediction."""
    console = Console(stderr=True)
    stats = generation.stats
    depths = Table("layers", "tokens", "share", title="Layers run before a token was final")
    for layers, count in stats.depths(engine.depth).items():
        depths.add_row("0 (copied)" if layers == 0 else str(layers), str(count), f"{count / stats.new_tokens:.0%}")
    console.print(depths)
    if stats.drafted:
        drafts = Table("drafter", "drafted", "accepted", "share", title=f"Drafts, {stats.deep_passes} verification passes")
        for name, drafted in stats.drafted.items():
            accepted = stats.accepted.get(name, 0)
            drafts.add_row(name, str(drafted), str(accepted), f"{accepted / drafted:.0%}")
        console.print(drafts)
    launches = Table("graph", "launches", title="Launches, prompt included")
    for graph, count in engine.backend.launches.items():
        launches.add_row(graph, str(count))
    console.print(launches)
    for line in _notes(engine, stats):
        console.print(line, style="dim", highlight=False)


def _notes(engine: Engine, stats: RequestStats) -> list[str]:
    calibration = engine.manifest.calibration
    in_exits = stats.exit_time * 1e3
    notes = [
        f"time: prompt {stats.time_to_first_token * 1e3:.0f} ms, exits and drafts {in_exits:.0f} ms, all layers "
        f"{stats.decode_time * 1e3 - in_exits:.0f} ms"
    ]
    if stats.speedup is not None and calibration is not None and calibration.costs is not None:
        costs = calibration.costs
        predicted = stats.predicted_speedup
        expected = "" if predicted is None else f"; the calibration predicts {predicted:.2f} on average"
        notes.append(
            f"speed {stats.speedup:.2f} times the uncut model's {costs.unsplit_ms:.2f} ms per token, which was measured when "
            f"calibrating on {costs.machine}{expected}"
        )
    if engine.row_padding is not None and (rows := engine.row_padding.launch.up(1)) > 1:
        notes.append(f"a single token runs as {rows} rows, so that texts do not depend on what shares their launches")
    if engine.backend.private_weights:
        notes.append(f"the weights are packed in this process's own memory: {engine.backend.private_weights}")
    if engine.bits_limitation is not None:
        notes.append(engine.bits_limitation)
    notes += [f"no certificate covers this output: {reason}" for reason in stats.uncovered]
    if stats.policy == "exit" and not stats.uncovered and calibration is not None and calibration.certificate is not None:
        c = calibration.certificate
        rate = f"at most {c.max_disagreement:.1%} of tokens differ from {c.compared_with}'s"
        notes.append(f"certified: {rate}, with {c.confidence:.0%} confidence")
    return notes
