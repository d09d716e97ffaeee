"""What an engine has done and does: totals, latencies and the state of its queue, as an object and for Prometheus
(https://prometheus.io/docs/instrumenting/exposition_formats)."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

from tide_runtime.outputs import Generation
from tide_runtime.prefix_cache_folder import FileCounts

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # upper bounds of the histograms' buckets


@dataclass(frozen=True)
class EngineStats:
    """The state of an engine, and totals since it was loaded.

    Args:
        waiting, running: requests without and with a row of KV memory.
        preemptions: how often a request gave up its KV memory for others.
        rotary_restarts: how often a text outgrew the short rotary factors and was computed again.
        steps, step_tokens: steps of the loop, and tokens that they ran: decodes, drafts and prompts.
        step_seconds: time of the steps.
        prompt_tokens, prefix_tokens: prompt tokens of requests that ended, and those that came from the prefix cache.
        kv_bytes, prefix_bytes: KV memory that running requests hold, and the prefix cache; states of recurrent layers included.
        free_bytes: KV memory that neither holds. Free rows keep theirs until it is needed.
        kv_memory: the budget of both, in bytes.
        snapshots: texts of which the prefix cache keeps the states of recurrent layers.
        prefix_disk: what was read from `EngineOptions.prefix_dir` and written there: blocks, and snapshots of states.
    """

    waiting: int
    running: int
    preemptions: int
    rotary_restarts: int
    steps: int
    step_tokens: int
    step_seconds: float
    prompt_tokens: int
    prefix_tokens: int
    kv_bytes: int
    prefix_bytes: int
    free_bytes: int
    kv_memory: int
    snapshots: int = 0
    prefix_disk: FileCounts = field(default_factory=FileCounts)


class Histogram:
    """Counts of seconds, by the buckets that Prometheus adds up."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_SECONDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_SECONDS, seconds)] += 1
        self.total += seconds

    def lines(self, name: str) -> list[str]:
        sums = list(accumulate(self.counts))
        bounds = [*map(str, _SECONDS), "+Inf"]
        buckets = [f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in zip(bounds, sums, strict=True)]
        return [*buckets, f"{name}_sum {self.total}", f"{name}_count {sums[-1]}"]


_HELP = {
    "tide_requests_total": "Sequences that ended, by the reason.",
    "tide_prompt_tokens_total": "Prompt tokens of sequences that ended.",
    "tide_generated_tokens_total": "Output tokens of sequences that ended, by the layers run before each was final.",
    "tide_drafted_tokens_total": "Drafts of policy exact, by drafter.",
    "tide_accepted_tokens_total": "Drafts that the model confirmed, by drafter.",
    "tide_deep_passes_total": "Runs to the last layer after the first token.",
    "tide_decoder_layers_total": "Decoder layers launched in decode steps, for each sequence that took part.",
    "tide_forced_exits_total": "Tokens that stopped early only to keep a depth budget.",
    "tide_uncovered_tokens_total": "Output tokens of policy exit that no certificate covers.",
    "tide_decode_seconds_total": "Time from first to last token, summed over sequences that ended.",
    "tide_exit_seconds_total": "Part of it in which exits were evaluated or drafts made.",
    "tide_graph_launches_total": "Launches, by graph, counted at the backend.",
}


_STATE_HELP = {
    "waiting": "Requests that wait for a row of KV memory.",
    "running": "Requests that have one.",
    "preemptions": "Times that a request gave up its KV memory for others.",
    "rotary_restarts": "Times that a text outgrew the short rotary factors and was computed again.",
    "steps": "Steps of the engine loop.",
    "step_tokens": "Tokens that the steps ran: decodes, drafts and prompts.",
    "step_seconds": "Time of the steps.",
    "prefix_tokens": "Prompt tokens that came from the prefix cache.",
    "kv_bytes": "KV memory that running requests hold, states of recurrent layers included.",
    "prefix_bytes": "KV memory that the prefix cache holds.",
    "kv_memory": "Budget of both.",
    "snapshots": "Texts of which the prefix cache keeps the states of recurrent layers.",
}
_DISK_HELP = {
    "reads": "Blocks and snapshots of prefixes that were read from disk.",
    "read_bytes": "Bytes of them.",
    "writes": "Blocks and snapshots of prefixes that were written to disk.",
    "written_bytes": "Bytes of them.",
    "damaged": "Files of prefixes that did not hold what their name says, and were deleted.",
}
_GAUGES = {"waiting", "running", "kv_bytes", "prefix_bytes", "kv_memory", "snapshots"}


class EngineMetrics:
    """Counts what the loop did; read from any thread."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._counts: Counter[tuple[str, str]] = Counter()
        self._first, self._between = Histogram(), Histogram()
        self._steps = 0
        self._step_tokens = 0
        self._step_seconds = 0.0
        self._prefix_tokens = 0
        self._prompt_tokens = 0
        self._lock = threading.Lock()

    def stepped(self, tokens: int, seconds: float) -> None:
        """Count one step of the loop, which ran ``tokens``."""
        with self._lock:
            self._steps += 1
            self._step_tokens += tokens
            self._step_seconds += seconds

    def took_token(self, since_last: float, first: bool) -> None:
        """A request got a token, ``since_last`` seconds after the one before or, the first one, after it was submitted."""
        with self._lock:
            (self._first if first else self._between).add(since_last)

    def stats(self, **state: Any) -> EngineStats:
        """The totals beside the scheduler's ``state``, which has the other fields of `EngineStats`."""
        with self._lock:
            return EngineStats(
                steps=self._steps,
                step_tokens=self._step_tokens,
                step_seconds=self._step_seconds,
                prompt_tokens=self._prompt_tokens,
                prefix_tokens=self._prefix_tokens,
                **state,
            )

    def add(self, generation: Generation) -> None:
        """Count one sequence that ended."""
        stats = generation.stats
        new_counts: Counter[tuple[str, str]] = Counter()
        new_counts["tide_requests_total", f'reason="{generation.finish_reason}"'] = 1
        new_counts["tide_prompt_tokens_total", ""] = stats.prompt_tokens
        depths = stats.depths(self.num_layers)
        new_counts.update({("tide_generated_tokens_total", f'layers="{layers}"'): count for layers, count in depths.items()})
        for name, counts in (("drafted", stats.drafted), ("accepted", stats.accepted)):
            new_counts.update({(f"tide_{name}_tokens_total", f'drafter="{drafter}"'): n for drafter, n in counts.items()})
        new_counts["tide_deep_passes_total", ""] = stats.deep_passes
        new_counts["tide_decoder_layers_total", ""] = round(stats.layers_per_token * max(1, stats.new_tokens - 1))
        new_counts["tide_forced_exits_total", ""] = stats.forced
        new_counts["tide_uncovered_tokens_total", ""] = stats.new_tokens if stats.uncovered else 0
        times = {
            "tide_decode_seconds_total": stats.decode_time,
            "tide_exit_seconds_total": stats.exit_time,
        }
        with self._lock:
            self._prompt_tokens += stats.prompt_tokens
            self._prefix_tokens += stats.prefix_tokens
            self._counts.update(new_counts)
            for metric, seconds in times.items():
                self._counts[metric, ""] += seconds  # type: ignore[assignment]  # a Counter adds floats as well

    def text(self, stats: EngineStats, launches: Mapping[str, int], same_bits: bool) -> str:
        """Everything in the Prometheus text format.

        Args:
            launches: graph name → times launched.
            same_bits: no text depends on the requests that run beside it.
        """
        with self._lock:
            counts = dict(self._counts)
            first = self._first.lines("tide_first_token_seconds")
            between = self._between.lines("tide_inter_token_seconds")
        counts |= {("tide_graph_launches_total", f'graph="{graph}"'): count for graph, count in launches.items()}
        lines = []
        for metric, about in _HELP.items():
            lines += [f"# HELP {metric} {about}", f"# TYPE {metric} counter"]
            for (name, labels), value in sorted(counts.items()):
                if name == metric:
                    lines.append(f"{metric}{{{labels}}} {value}" if labels else f"{metric} {value}")
        for one in fields(stats):
            if one.name in _STATE_HELP:
                kind = "gauge" if one.name in _GAUGES else "counter"
                metric = f"tide_{one.name}" + ("" if kind == "gauge" else "_total")
                lines += [f"# HELP {metric} {_STATE_HELP[one.name]}", f"# TYPE {metric} {kind}"]
                lines.append(f"{metric} {getattr(stats, one.name)}")
        for name, count in stats.prefix_disk._asdict().items():
            metric = f"tide_prefix_disk_{name}_total"
            lines += [f"# HELP {metric} {_DISK_HELP[name]}", f"# TYPE {metric} counter", f"{metric} {count}"]
        lines += ["# HELP tide_same_bits Whether a text is the same whatever requests share its launches."]
        lines += ["# TYPE tide_same_bits gauge", f"tide_same_bits {int(same_bits)}"]
        lines += ["# HELP tide_first_token_seconds Time to first token.", "# TYPE tide_first_token_seconds histogram", *first]
        lines += ["# HELP tide_inter_token_seconds Time between tokens.", "# TYPE tide_inter_token_seconds histogram", *between]
        return "\n".join(lines) + "\n"
