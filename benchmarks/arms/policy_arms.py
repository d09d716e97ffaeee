"""The arms of the depth-policy benchmark on one model: every policy and drafter, as options of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tide_bench.arms.tide import load_second
from tide_bench.build_cache import cached_folder, files_digest
from tide_bench.bundles import export_bundle, with_exits, write_changed
from tide_runtime import DepthOptions, Engine
from tide_runtime.bundle.manifest import MANIFEST_NAME, Manifest, read_manifest

from benchmarks.arms.turns import EngineArm
from benchmarks.models.model_folders import random_identity, random_twin

BASELINE = "full"


@dataclass(frozen=True)
class PolicyArm:
    """A policy with its options. ``percent``: the certified disagreement of the bundle it runs on."""

    title: str
    policy: str
    depth: DepthOptions = field(default_factory=DepthOptions)
    percent: int = 1


POLICIES = {
    BASELINE: PolicyArm("TIDE full", "full"),
    "exact_none": PolicyArm("TIDE exact, no drafts", "exact", DepthOptions(draft="none")),
    "exact_ngram": PolicyArm("TIDE exact, n-gram drafts", "exact", DepthOptions(draft="ngram")),
    "exact_router": PolicyArm("TIDE exact, router drafts", "exact", DepthOptions(draft="router")),
    "exact_both": PolicyArm("TIDE exact, both", "exact"),
    "exit1": PolicyArm("TIDE exit at 1%", "exit"),
    "exit1_propagate": PolicyArm("… keys and values propagated", "exit", DepthOptions(kv="propagate")),
    "exit5": PolicyArm("TIDE exit at 5%", "exit", percent=5),
    "exit5_propagate": PolicyArm("… keys and values propagated", "exit", DepthOptions(kv="propagate"), percent=5),
}


@contextmanager
def policy_arms(bundles: Mapping[int, Path], names: Sequence[str], batch: int) -> Iterator[dict[str, EngineArm]]:
    """`POLICIES` of ``names`` for ``batch`` sequences at once, on ``bundles`` by certified percentage; closed at the end.

    Arms on the same bundle share its weights: where in memory a graph lies makes it a percent or two faster or slower for as
    long as it is loaded.
    """
    with ExitStack() as stack:
        loaded: dict[int, Engine] = {}
        arms = {}
        for name in names:
            arm = POLICIES[name]
            if arm.percent not in loaded:
                loaded[arm.percent] = stack.enter_context(load_second(bundles[arm.percent]))
            weights = loaded[arm.percent]
            options = replace(weights.options, policy=arm.policy, depth=arm.depth, max_batch=batch)
            arms[name] = EngineArm(arm.title, stack.enter_context(weights.with_options(options)))
        yield arms


def random_bundle(calibrated: Path, cache: Path) -> Path:
    """Random weights with a calibration that is wrong about them: the costs, places and expectations of ``calibrated``, and exits
    that are always sure for ``exact`` and never for ``exit``."""
    known = read_manifest(calibrated).calibration
    assert known is not None
    places = [e.checkpoint for e in known.exits] or [read_manifest(calibrated).model.num_layers // 4]
    at, folder = ",".join(map(str, places)), cache / "random" / "bundle"
    cut = export_bundle(random_twin(cache), random_identity(), folder, at, tokenizer="none")
    key = files_digest([calibrated / MANIFEST_NAME, cut / MANIFEST_NAME, Path(__file__)])

    def make(folder: Path) -> None:
        write_changed(cut, folder / "bundle", _never_stopping(with_exits(read_manifest(cut), places, known)))

    return cached_folder(cache / "random" / "wrong", key, make) / "bundle"


def _never_stopping(manifest: Manifest) -> Manifest:
    """The exits with thresholds that no softmax of a random model reaches."""
    assert manifest.calibration is not None
    exits = [replace(info, exit_threshold=1.0) for info in manifest.calibration.exits]
    return replace(manifest, calibration=replace(manifest.calibration, exits=exits))
