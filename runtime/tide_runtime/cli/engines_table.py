"""What ``tide-inspect`` says of a bundle's engines: what built them and for what, how large they are."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.table import Table

from tide_runtime.cli.human_size import human_size
from tide_runtime.manifest import TargetInfo


def engine_facts(target: TargetInfo) -> dict[str, Any]:
    """Facts of a target with engines as JSON values; times in seconds."""
    attention: Counter[str] = Counter()
    for engine in target.engines.values():
        attention[engine.attention] += engine.attentions
    return {
        "compute": target.compute,
        "tool": target.tool,
        "build_seconds": round(sum(engine.build_seconds for engine in target.engines.values()), 2),
        "attention": {kind: count for kind, count in attention.items() if count},
        "profiles": [asdict(profile) for profile in target.profiles],
        "engines": {name: asdict(engine) for name, engine in target.engines.items()},
    }


def engines_table(targets: dict[str, Any]) -> list[Table]:
    """One row for each target with engines; no table when there is none."""
    built = {name: facts for name, facts in targets.items() if "engines" in facts}
    if not built:
        return []
    table = Table(title="Engines", title_justify="left", title_style="bold")
    for column in ("target", "built with", "sm", "engines", "size", "build s", "attentions", "steps"):
        table.add_column(column, justify="right" if column in ("engines", "size", "build s") else "left", overflow="fold")
    for name, facts in built.items():
        table.add_row(
            name,
            facts["tool"],
            ", ".join(map(str, facts["compute"])),
            str(len(facts["engines"])),
            human_size(facts["graph_bytes"]),
            f"{facts['build_seconds']:.1f}",
            ", ".join(f"{count} {kind}" for kind, count in facts["attention"].items()),
            "; ".join(_steps(profile) for profile in facts["profiles"]),
        )
    return [table]


def _steps(profile: dict[str, Any]) -> str:
    rows, tokens = profile["rows"], profile["tokens"]
    return f"{profile['name']} {rows[0]}–{rows[2]} × {tokens[0]}–{tokens[2]}"
