"""Facts and tables of a bundle's engines for ``tide-inspect``: builder, architectures, sizes, profiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from tide_runtime.bundle.manifest import TargetInfo
from tide_runtime.cli.tables import human_size, titled_table

_NUMBERS = ("engines", "size", "build s")


def engine_facts(target: TargetInfo, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Facts of a target with engines as JSON values, times in seconds. ``sizes``: engine name → file size in bytes."""
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
    """A table of the targets with engines and one of the engines; no tables when there are none."""
    built = {name: facts for name, facts in targets.items() if "engines" in facts}
    if not built:
        return []
    summary = titled_table("Engines", ("target", "built with", "sm", "engines", "size", "build s", "steps"), _NUMBERS)
    each = titled_table("Each engine", ("target", "engine", "size", "build s", "attentions"), _NUMBERS)
    for name, facts in built.items():
        summary.add_row(
            name,
            facts["tool"],
            ", ".join(map(str, facts["compute"])),
            str(len(facts["engines"])),
            human_size(facts["graph_bytes"]),
            f"{facts['build_seconds']:.1f}",
            "; ".join(_steps(profile) for profile in facts["profiles"]),
        )
        for graph, engine in facts["engines"].items():
            attention = f"{engine['attentions']} {engine['attention']}" if engine["attentions"] else ""
            each.add_row(name, graph, human_size(engine["bytes"]), f"{engine['build_seconds']:.1f}", attention)
    return [summary, each]


def _steps(profile: dict[str, Any]) -> str:
    rows, tokens = profile["rows"], profile["tokens"]
    return f"{profile['name']} {rows[0]}–{rows[2]} × {tokens[0]}–{tokens[2]}"
