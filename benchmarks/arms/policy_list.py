"""The arms of the depth-policy benchmark by name: what they are called, and which policy with which options they run."""

from __future__ import annotations

from dataclasses import dataclass

from tide_runtime.depth.options import Drafters, SkippedKV


@dataclass(frozen=True)
class PolicyArm:
    """A depth policy of the runtime. ``percent``: the certified disagreement of the bundle it runs on."""

    title: str
    policy: str
    draft: Drafters = "all"
    percent: int = 1
    kv: SkippedKV = "deferred"


POLICIES = {
    "full": PolicyArm("TIDE full", "full"),
    "exact_none": PolicyArm("TIDE exact, no drafts", "exact", "none"),
    "exact_ngram": PolicyArm("TIDE exact, n-gram drafts", "exact", "ngram"),
    "exact_router": PolicyArm("TIDE exact, router drafts", "exact", "router"),
    "exact_both": PolicyArm("TIDE exact, both", "exact", "all"),
    "exit1": PolicyArm("TIDE exit at 1%", "exit"),
    "exit1_propagate": PolicyArm("… keys and values propagated", "exit", kv="propagate"),
    "exit5": PolicyArm("TIDE exit at 5%", "exit", percent=5),
    "exit5_propagate": PolicyArm("… keys and values propagated", "exit", percent=5, kv="propagate"),
}
HF_TITLES = {
    "eager": "HF eager",
    "prompt_lookup": "HF prompt lookup",
    "early_exit": "HF assistant_early_exit",
    "predecessor": "tide-inference",
}
COMPARED_TITLES = {
    "unsplit_bundle": "unsplit, a bundle of its own",
    "exit1_entropy": "… asked by entropy",
    "static": "static layer skip",
}
TITLES = {name: arm.title for name, arm in POLICIES.items()} | COMPARED_TITLES | HF_TITLES
