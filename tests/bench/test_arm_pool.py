"""The pool of arms: what it starts, and arms that fail."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tide_bench import arm_pool
from tide_bench.arm_folders import ArmFolders
from tide_bench.arm_pool import ArmPool, RunningArm
from tide_bench.arms import ArmSpec
from tide_bench.arms.base import ArmDevice
from tide_bench.arms.process import ArmError
from tide_bench.report import Phases
from tide_bench.source_model import SourceModel

MANIFEST: Any = SimpleNamespace(model=SimpleNamespace(fingerprint="f" * 64), dtype="fp32", max_seq_len=16)


class Loaded:
    """Stands for a process. No genai on this machine."""

    def __init__(self, kind: str, folder: Path, device: ArmDevice) -> None:
        if kind == "genai":
            raise ArmError("no wheel")


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> ArmPool:
    monkeypatch.setattr(arm_pool, "ArmProcess", Loaded)
    monkeypatch.setattr("tide_bench.arms.genai.build_model_folder", lambda weights, identity, folder, precision: folder)
    folders = ArmFolders(Path("engine"), MANIFEST, SourceModel(Path("weights"), "identity"), Path("cache"))
    return ArmPool(folders, Phases(lambda text: None))


def _specs(*kinds: str) -> list[ArmSpec]:
    return [ArmSpec(kind, kind, kind, "same") for kind in kinds]


def test_an_arm_that_cannot_run_ends_no_other(pool: ArmPool) -> None:
    """One library that is missing would end the benchmark of all."""
    assert [e.spec.name for e in pool.start(_specs("eager", "genai", "tide"))] == ["eager", "tide"]
    assert pool.failures == {"genai": "no wheel"}


def test_an_arm_that_fails_the_rehearsal_is_left_out(pool: ArmPool) -> None:
    """An arm that generates nothing would be timed."""

    def rehearse(entry: RunningArm) -> None:
        raise ArmError(f"{entry.spec.name}: out of memory")

    assert pool.start(_specs("tide"), rehearse) == [] and pool.failures == {"tide": "tide: out of memory"}
