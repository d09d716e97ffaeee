"""The pool of arms: the order of preparation, what runs at once, and arms that fail."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from tide_bench import arm_folders, arm_pool
from tide_bench.arm_folders import ArmFolders
from tide_bench.arm_pool import ArmPool, RunningArm
from tide_bench.arms import ArmSpec
from tide_bench.arms.base import ArmDevice, use_all_cores
from tide_bench.arms.process import ArmError
from tide_bench.report import Phases
from tide_bench.source_model import SourceModel

MANIFEST: Any = SimpleNamespace(model=SimpleNamespace(fingerprint="f" * 64), dtype="fp32", max_seq_len=16)


class Loaded:
    """Stands for a process; notes when it was started. No genai on this machine."""

    order: ClassVar[list[str]] = []

    def __init__(self, kind: str, folder: Path, threads: int | None, device: ArmDevice) -> None:
        self.folder, self.threads, self.device = folder, threads, device
        if kind == "genai":
            raise ArmError("no wheel")
        Loaded.order.append(kind)

    def apply(self, function: Any) -> None:
        assert function is use_all_cores
        self.threads = None


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[dict[Path, str]]:
    """What was exported together; nothing is."""
    calls: list[dict[Path, str]] = []

    def export(weights: Path, identity: str, cuts: dict[Path, str], dtype: str, slots: int, target: str) -> dict[Path, Path]:
        calls.append(cuts)
        return {folder: folder / "bundle" for folder in cuts}

    monkeypatch.setattr(arm_folders, "export_cuts", export)
    monkeypatch.setattr(arm_pool, "ArmProcess", Loaded)
    monkeypatch.setattr(Loaded, "order", [])
    monkeypatch.setattr("tide_bench.arms.genai.build_model_folder", lambda weights, identity, folder, precision: folder)
    return calls


def _pool(kinds: list[str], depth: Any = lambda: 9, lanes: int = 2) -> ArmPool:
    source = SourceModel(Path("weights"), "identity")
    folders = ArmFolders(Path("engine"), MANIFEST, source, Path("cache"), kinds, depth)
    return ArmPool(folders, lanes, Phases(lambda text: None))


def _specs(*kinds: str) -> list[ArmSpec]:
    return [ArmSpec(kind, kind, kind, "same") for kind in kinds]


def test_tide_first_then_the_longest_and_the_answer_in_order(exports: list) -> None:
    """Static skip would need the depth of an arm that is not there, or everything would wait for the compiler at the end."""
    specs = _specs("unsplit", "eager", "compile", "tide", "genai")
    pool = _pool(["tide"])
    assert [e.spec.name for e in pool.start(specs[1:])] == ["eager", "compile", "tide"]
    assert Loaded.order[0] == "tide" and pool.failures == {"genai": "no wheel"}


def test_two_arms_get_ready_at_once_but_never_beside_tide(exports: list) -> None:
    """Preparing would take twice as long; or an answer of TIDE's be mixed up with another."""
    both, beside = Barrier(2, timeout=20), list[str]()

    def rehearse(entry: RunningArm) -> None:
        if entry.spec.kind == "tide":
            beside.extend(Loaded.order)
        else:
            both.wait()  # passes only when a second one comes

    _pool(["tide"]).start(_specs("tide", "eager", "compile"), rehearse)
    assert beside == ["tide"]


@pytest.mark.parametrize("lanes", [1, 2])
def test_torch_keeps_to_one_core_while_others_get_ready(exports: list, lanes: int) -> None:
    """Its threads would wait for each other on cores that a compiler uses; or time an eager model on one core."""
    while_ready = {}

    def rehearse(entry: RunningArm) -> None:
        while_ready[entry.spec.kind] = entry.process.threads  # type: ignore[attr-defined]

    entries = _pool(["tide"], lanes=lanes).start(_specs("tide", "eager", "compile", "predecessor"), rehearse)
    few = 1 if lanes > 1 else None
    assert while_ready == {"tide": None, "eager": few, "compile": None, "predecessor": few}
    assert {entry.process.threads for entry in entries} == {None}  # type: ignore[attr-defined]


def test_an_arm_that_dies_in_the_rehearsal_ends_no_other(exports: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """One arm that ran out of memory would end the benchmark of all."""

    def dead(loaded: Loaded, function: Any) -> None:
        raise ArmError("its process is gone")

    monkeypatch.setattr(Loaded, "apply", dead)
    pool = _pool(["tide"])
    assert [e.spec.name for e in pool.start(_specs("tide", "eager", "compile"))] == ["tide", "compile"]
    assert pool.failures == {"eager": "its process is gone"}


def test_our_own_graphs_come_from_one_trace(exports: list) -> None:
    """Tracing, which is most of an export, would be done for each of them."""
    kinds = ["tide", "unsplit", "static"]
    entries = _pool(kinds).start(_specs(*kinds))
    assert [list(cuts.values()) for cuts in exports] == [["none", "9"]]
    assert [e.process.folder.parent.name for e in entries[1:]] == ["unsplit", "static_9"]  # type: ignore[attr-defined]


def test_an_unknown_depth_keeps_only_static_skip_from_running(exports: list) -> None:
    """A bundle without exits would lose its baseline."""

    def no_exits() -> int:
        raise ArmError("the bundle has no exits")

    kinds = ["tide", "unsplit", "static"]
    pool = _pool(kinds, no_exits)
    assert [e.spec.name for e in pool.start(_specs(*kinds))] == ["tide", "unsplit"]
    assert pool.failures == {"static": "the bundle has no exits"}


def test_an_arm_that_fails_the_rehearsal_is_left_out(exports: list) -> None:
    """An arm that generates nothing would be timed."""

    def rehearse(entry: RunningArm) -> None:
        raise ArmError(f"{entry.spec.name}: out of memory")

    pool = _pool(["tide"])
    assert pool.start(_specs("tide"), rehearse) == [] and pool.failures == {"tide": "tide: out of memory"}
