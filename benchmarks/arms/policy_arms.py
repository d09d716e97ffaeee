"""The arms of the depth-policy benchmark on one model: every policy and drafter, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tide_bench.arms import REFERENCE
from tide_bench.arms.process import ArmError
from tide_bench.arms.tide import load_engine, load_second
from tide_bench.bundles import build_unsplit, export_bundle
from tide_bench.stub_exits import with_exits
from tide_runtime import GenerationParams, TideError
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import DepthPolicy
from tide_runtime.depth.registry import make_policy

from benchmarks.arms.engine_arm import EngineArm, LoggedEngine
from benchmarks.arms.entropy_exit import entropy_exit, listening_exit
from benchmarks.arms.hf_arms import PREDECESSOR, HFArm, hf_options
from benchmarks.arms.policy_list import HF_TITLES, POLICIES, PolicyArm
from benchmarks.arms.turns import Arm, Group
from benchmarks.models.calibrated_bundles import demo_identity
from benchmarks.models.demo import DEMO_MODELS
from benchmarks.models.random_twin import random_identity, random_twin

CHUNK = 256  # prompt tokens per prefill step, the engine's default
NEVER_SURE = 1.0  # a threshold that no softmax of a random model reaches


@dataclass
class ArmSet:
    """The arms on one model that could be made, and why the others could not. ``costs``: None when they were not measured."""

    model: str
    baseline: EngineArm
    costs: CostModel | None
    arms: dict[str, Arm] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, make: Callable[[], Arm]) -> None:
        """An arm that cannot run is a row of the table, not the end of the benchmark."""
        try:
            self.arms[name] = make()
        except (TideError, ArmError) as error:
            self.failures[name] = str(error)

    def drop(self, name: str, reason: str) -> None:
        """Take out an arm that failed on the way."""
        self.failures[name] = reason
        _close(self.arms.pop(name))

    def close(self) -> None:
        for arm in self.arms.values():
            _close(arm)


def demo_arms(
    model: str, bundles: Mapping[int, Path], wanted: Sequence[str], sample: Sequence[Group], new_tokens: int, cache: Path
) -> ArmSet:
    """Arms on a demo model. ``bundles``: calibrated ones, by certified percentage; ``sample``: prompts to fit baselines on."""
    weights, identity = DEMO_MODELS / model, demo_identity(model)
    engines = {percent: LoggedEngine(load_second(folder)) for percent, folder in bundles.items()}
    own = engines[1].manifest
    arms = ArmSet(model, uncut_beside(engines[1]), _costs(own))
    params = GenerationParams(max_new_tokens=new_tokens, ignore_eos=True)
    for name in (name for name in POLICIES if name in wanted):
        arms.add(name, partial(_policy_arm, POLICIES[name], engines[POLICIES[name].percent]))
    if "unsplit_bundle" in wanted:
        arms.add("unsplit_bundle", lambda: _unsplit_arm(build_unsplit(weights, identity, cache / model / "unsplit")))
    if "exit1_entropy" in wanted:
        arms.add("exit1_entropy", lambda: _entropy_arm(engines[1], sample, params))
    if "static" in wanted:
        arms.add("static", lambda: _static_arm(weights, identity, engines[1], sample, params, cache / model / "static"))
    exit_layer = own.calibration.exits[0].checkpoint if own.calibration is not None and own.calibration.exits else 6
    for name in (name for name in HF_TITLES if name in wanted):
        kind = name if name == PREDECESSOR else REFERENCE
        arms.add(name, partial(HFArm, weights, hf_options(name, exit_layer), kind))
    return arms


def random_arms(calibrated: Path, wanted: Sequence[str], cache: Path) -> ArmSet:
    """Arms on random weights with a calibration that is wrong about them: the demo's costs, exits and expectations.

    ``exact`` drafts whenever it may; ``exit`` evaluates its exits at every token and takes none.
    """
    weights, known = random_twin(cache), load_engine(calibrated).manifest
    assert known.calibration is not None
    places = [e.checkpoint for e in known.calibration.exits] or [known.model.num_layers // 4]
    bundle = export_bundle(weights, random_identity(), cache / "random" / "bundle", ",".join(map(str, places)))
    engine = LoggedEngine(load_second(bundle))
    costs, predicted, depths = known.calibration.costs, known.calibration.predicted, known.calibration.exit_depths
    sure = with_exits(engine.manifest, places, costs, predicted=predicted)
    unsure = with_exits(engine.manifest, places, costs, exit_threshold=NEVER_SURE, predicted=predicted, exit_depths=depths)
    arms = ArmSet("random", uncut_beside(engine), _costs(sure))
    for name in (name for name in POLICIES if name in wanted and POLICIES[name].percent == 1 and name != "exit1_propagate"):
        arms.add(name, partial(_policy_arm, POLICIES[name], engine, unsure if name == "exit1" else sure))
    return arms


def uncut_beside(engine: LoggedEngine) -> EngineArm:
    """The uncut graph of the engine's bundle, the baseline of what it runs: the same session, other caches and counts."""
    return EngineArm(engine.second(), FullDepth())


def _unsplit_arm(folder: Path) -> EngineArm:
    engine = LoggedEngine(load_second(folder))
    return EngineArm(engine, FullDepth())


def _costs(manifest: Manifest) -> CostModel | None:
    return CostModel.of(manifest) if manifest.calibration is not None and manifest.calibration.costs is not None else None


def _policy_arm(arm: PolicyArm, engine: LoggedEngine, manifest: Manifest | None = None) -> EngineArm:
    options = DepthOptions(draft=arm.draft, kv=arm.kv)
    return EngineArm(engine, make_policy(arm.policy, manifest or engine.manifest, options))


def _exit_policy(manifest: Manifest) -> ExitDepth:
    return ExitDepth(manifest, DepthOptions())


def _entropy_arm(engine: LoggedEngine, sample: Sequence[Group], params: GenerationParams) -> EngineArm:
    heard_by = _exit_policy(engine.manifest)
    answers = listening_exit(engine.manifest, heard_by)
    _run(engine, heard_by, sample, params)
    return EngineArm(engine, entropy_exit(engine.manifest, _exit_policy(engine.manifest), answers))


def _static_arm(
    weights: Path, identity: str, engine: LoggedEngine, sample: Sequence[Group], params: GenerationParams, folder: Path
) -> EngineArm:
    """Every token is the prediction of an identity head after the mean depth of `exit`."""
    depth = round(_run(engine, _exit_policy(engine.manifest), sample, params))
    depth = min(depth, engine.manifest.model.num_layers - 1)
    static = LoggedEngine(load_engine(export_bundle(weights, identity, folder / str(depth), str(depth))))
    calibration = engine.manifest.calibration
    costs = calibration.costs if calibration is not None else None
    return EngineArm(static, _exit_policy(with_exits(static.manifest, [depth], costs)))


def _run(engine: LoggedEngine, policy: DepthPolicy, sample: Sequence[Group], params: GenerationParams) -> float:
    """Run the sample; returns the mean depth."""
    depths = [engine.turn(policy, group, params, 1).depth or 0.0 for group in sample]
    return sum(depths) / len(depths)


def _close(arm: Arm) -> None:
    if isinstance(arm, HFArm):
        arm.close()
