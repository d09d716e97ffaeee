"""What the calibration promised about one request, and whether it was kept: its speed, and the certificate of policy ``exit``."""

from __future__ import annotations

from dataclasses import replace

from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.options import DepthOptions
from tide_runtime.outputs import RequestStats
from tide_runtime.sequence import TokenSequence

_EXACT = {"all": "exact", "router": "exact:router", "ngram": "exact:ngram"}  # names of its predictions, by drafters


def with_promises(stats: RequestStats, sequence: TokenSequence, manifest: Manifest, options: DepthOptions) -> RequestStats:
    """``stats`` of the finished ``sequence`` with its speed beside the predicted one, and why no certificate covers it."""
    calibration = manifest.calibration
    if calibration is None:
        return stats
    speedup = predicted = None
    if calibration.costs is not None and sequence.history.peak_batch == 1 and stats.new_tokens > 1:
        speedup = calibration.costs.unsplit_ms * stats.tokens_per_second / 1e3
        foretold = _predicted(stats.policy, options)
        predicted = calibration.predicted.get(foretold) if foretold and sequence.params.takes_likeliest else None
    return replace(
        stats, speedup=speedup, predicted_speedup=predicted, uncovered=tuple(_uncovered(stats, sequence, manifest, options))
    )


def _predicted(policy: str, options: DepthOptions) -> str | None:
    """The prediction's name; None where the options are not those it was made for."""
    if policy == "exact":
        return _EXACT.get(options.draft) if options.draft_limit is None else None
    if policy == "exit":
        as_predicted = DepthOptions(draft=options.draft, draft_limit=options.draft_limit, max_wait_steps=options.max_wait_steps)
        return policy if options == as_predicted else None
    return policy


def _uncovered(stats: RequestStats, sequence: TokenSequence, manifest: Manifest, options: DepthOptions) -> list[str]:
    """Reasons, in words; none where the policy is another one, as there is nothing to cover then."""
    calibration = manifest.calibration
    reasons = list[str]()
    if stats.policy != "exit" or calibration is None:
        return reasons
    if calibration.certificate is None:
        reasons.append("this bundle has no certificate")
    if options.exit_rule == "model":
        reasons.append("tokens stopped by the model's own rule (exit_rule model)")
    if options.threshold is not None:
        reasons.append(f"threshold {options.threshold:g} was set by hand")
    certified = [exit.checkpoint for exit in calibration.exits if exit.exit_threshold is not None]
    if certified and options.min_depth > certified[0]:
        reasons.append(f"min_depth {options.min_depth} leaves out exits, and deeper ones were certified together with them")
    if not sequence.params.takes_likeliest:
        changed = "the text was sampled, or penalties, biases or a grammar changed its logits"
        reasons.append(f"{changed}, and the certificate is about the likeliest token")
    if stats.forced:
        reasons.append(f"{stats.forced} tokens stopped early only to keep the depth budget")
    return reasons
