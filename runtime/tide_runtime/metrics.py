"""Totals of an engine in the Prometheus text format (https://prometheus.io/docs/instrumenting/exposition_formats)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from tide_runtime.outputs import Generation

_HELP = {
    "tide_requests_total": "Sequences that ended, by the reason.",
    "tide_prompt_tokens_total": "Prompt tokens of sequences that ended.",
    "tide_generated_tokens_total": "Output tokens of sequences that ended, by the layers run before each was final.",
    "tide_drafted_tokens_total": "Drafts of policy exact, by drafter.",
    "tide_accepted_tokens_total": "Drafts that the model confirmed, by drafter.",
    "tide_deep_passes_total": "Runs to the last layer after the first token.",
    "tide_decoder_layers_total": "Decoder layers launched in decode steps, for each sequence that took part.",
    "tide_forced_exits_total": "Tokens that stopped early only to keep a depth budget.",
    "tide_prompt_exits_total": "Prompt tokens that stopped early.",
    "tide_uncovered_tokens_total": "Output tokens of policy exit that no certificate covers.",
    "tide_first_token_seconds_total": "Time to first token, summed over sequences that ended.",
    "tide_decode_seconds_total": "Time from first to last token, summed over sequences that ended.",
    "tide_exit_seconds_total": "Part of it in which exits were evaluated or drafts made.",
    "tide_graph_launches_total": "Launches, by graph, counted at the backend.",
}


class EngineMetrics:
    """Counts of sequences that ended; safe to feed from several threads."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, generation: Generation) -> None:
        """Count one sequence that ended."""
        stats = generation.stats
        found: Counter[tuple[str, str]] = Counter()
        found["tide_requests_total", f'reason="{generation.finish_reason}"'] = 1
        found["tide_prompt_tokens_total", ""] = stats.prompt_tokens
        depths = stats.depths(self._num_layers)
        found.update({("tide_generated_tokens_total", f'layers="{layers}"'): count for layers, count in depths.items()})
        for name, counts in (("drafted", stats.drafted), ("accepted", stats.accepted)):
            found.update({(f"tide_{name}_tokens_total", f'drafter="{drafter}"'): n for drafter, n in counts.items()})
        found["tide_deep_passes_total", ""] = stats.deep_passes
        found["tide_decoder_layers_total", ""] = round(stats.layers_per_token * max(1, stats.new_tokens - 1))
        found["tide_forced_exits_total", ""] = stats.forced
        found["tide_prompt_exits_total", ""] = stats.prompt_exits
        found["tide_uncovered_tokens_total", ""] = stats.new_tokens if stats.uncovered else 0
        times = {
            "tide_first_token_seconds_total": stats.time_to_first_token,
            "tide_decode_seconds_total": stats.decode_time,
            "tide_exit_seconds_total": stats.exit_time,
        }
        with self._lock:
            self._counts.update(found)
            for metric, seconds in times.items():
                self._counts[metric, ""] += seconds  # type: ignore[assignment]  # a Counter adds floats as well

    def text(self, launches: Mapping[str, int]) -> str:
        """All totals; ``launches``: graph name → times launched."""
        with self._lock:
            counts = dict(self._counts)
        counts |= {("tide_graph_launches_total", f'graph="{graph}"'): count for graph, count in launches.items()}
        lines = []
        for metric, about in _HELP.items():
            lines += [f"# HELP {metric} {about}", f"# TYPE {metric} counter"]
            for (name, labels), value in sorted(counts.items()):
                if name == metric:
                    lines.append(f"{metric}{{{labels}}} {value}" if labels else f"{metric} {value}")
        return "\n".join(lines) + "\n"
