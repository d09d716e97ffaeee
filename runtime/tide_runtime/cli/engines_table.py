"""What ``tide-inspect`` says of a bundle's engines: what built them and for what, how large they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from tide_runtime.cli.human_size import human_size
from tide_runtime.manifest import TargetInfo


def engine_facts(target: TargetInfo, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Facts of a target with engines as JSON values; times in seconds, ``sizes`` of their files in bytes."""
    attention: Counter[str] = Counter()
    for engine in target.engines.values():
        attention[engine.attention] += engine.attentions
    return {
        "compute": target.compute,
        "tool": target.tool,
        "build_seconds": round(sum(engine.build_seconds for engine in target.engines.values()), 2),
        "attention": {kind: count for kind, count in attention.items() if count},
        "profiles": [asdict(profile) for profile in target.profiles],
        "engines": {name: {"bytes": sizes[name], **asdict(engine)} for name, engine in target.engines.items()},
    }


def engines_table(targets: dict[str, Any]) -> list[Table]:
    """A row for each target with engines, below it one for each of them; no table when there is none."""
    built = {name: facts for name, facts in targets.items() if "engines" in facts}
    if not built:
        return []
    table = Table(title="Engines", title_justify="left", title_style="bold")
    for column in ("target", "built with", "sm", "engine", "size", "build s", "attentions", "steps"):
        table.add_column(column, justify="right" if column in ("size", "build s") else "left", overflow="fold")
    for name, facts in built.items():
        table.add_row(
            name,
            facts["tool"],
            ", ".join(map(str, facts["compute"])),
            f"all {len(facts['engines'])}",
            human_size(facts["graph_bytes"]),
            f"{facts['build_seconds']:.1f}",
            ", ".join(f"{count} {kind}" for kind, count in facts["attention"].items()),
            "; ".join(_steps(profile) for profile in facts["profiles"]),
        )
        for engine, own in facts["engines"].items():
            attention = f"{own['attentions']} {own['attention']}" if own["attentions"] else ""
            table.add_row("", "", "", engine, human_size(own["bytes"]), f"{own['build_seconds']:.1f}", attention, "")
    return [table]


def _steps(profile: dict[str, Any]) -> str:
    rows, tokens = profile["rows"], profile["tokens"]
    return f"{profile['name']} {rows[0]}–{rows[2]} × {tokens[0]}–{tokens[2]}"
