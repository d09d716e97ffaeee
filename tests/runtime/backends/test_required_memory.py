"""What targets take of a device's memory, told before they are loaded."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runtime.host_device import HostDevice
from tide_runtime import ThreadOptions
from tide_runtime.backends.device.device_caches import slots_for
from tide_runtime.backends.onnxruntime.cuda import OnnxRuntimeCudaBackend
from tide_runtime.backends.required_memory import RequiredMemory, _ways_to_fit, require_room, required_memory
from tide_runtime.bundle import Bundle
from tide_runtime.cli.inspect import app
from tide_runtime.errors import DeviceMemoryError
from typer.testing import CliRunner

GIB = 1 << 30


def test_what_is_told_is_what_is_taken(bundle: Path) -> None:
    """Guards against engines that are refused where they fit, or run out of memory when they are loaded."""
    opened, device = Bundle.open(bundle), HostDevice()
    backend = OnnxRuntimeCudaBackend.load(opened, "cuda", ThreadOptions(1), device, ("CPUExecutionProvider", {}))
    told = required_memory(opened, "cuda", rows=3)
    files = sum(opened.manifest.files[file].bytes for file in opened.manifest.targets["cuda"].graphs.values())
    held = opened.manifest.files[opened.manifest.targets["cuda"].weights or ""].bytes
    assert 0.5 * held < told.weights - files <= held  # of the other target are some as well
    context: Any = backend.context(16)
    context.caches.reserve(opened.manifest.max_seq_len, 3)
    assert context.caches._memory.provided == 3 * told.row and told.rows == 3
    assert told.total == told.least + 2 * told.row
    assert told.rows_within(told.total) == 3 and told.rows_within(told.total - 1) == 2 and told.rows_within(0) == 0


def test_an_engine_that_does_not_fit_is_refused_with_what_would(bundle: Path) -> None:
    """Guards against minutes of loading that end without memory, and an error that names no remedy."""
    opened = Bundle.open(bundle)
    least = required_memory(opened, "cuda").least
    device: Any = SimpleNamespace(ordinal=1, name="RTX 9", free_memory=lambda: least)
    require_room(opened, "cuda", device)
    device.free_memory = lambda: least - 1
    with pytest.raises(DeviceMemoryError, match=r"cuda does not fit on GPU 1 \(RTX 9\).*weights.*are free; it would with.*int4"):
        require_room(opened, "cuda", device)
    device.free_memory = lambda: None  # nobody can tell
    require_room(opened, "cuda", device)


@pytest.mark.parametrize(
    ("free", "share", "ways"),
    [
        (17 * GIB, 0.35, ["tide-export --max-seq-len 1536", "tide-export --weights int4"]),
        (8 * GIB, 0.35, ["tide-export --weights int4"]),
        (7 * GIB, 0.35, ["tide-export --weights int4 --max-seq-len 2304"]),
        (5 * GIB, 0.35, []),
        (17 * GIB, 1.0, ["tide-export --max-seq-len 1536"]),
    ],
)
def test_only_options_that_fit_are_named(free: int, share: float, ways: list[str]) -> None:
    """Guards against a hint that ends in the same error."""
    assert _ways_to_fit(RequiredMemory(16 * GIB, 2 * GIB, GIB // 4, 1, 4096), free, share) == ways


def test_slots_double_up_to_the_limit() -> None:
    """Guards against a row that is told to be smaller than the caches make it."""
    assert [slots_for(needed, 4096, 512) for needed in (0, 512, 513, 2049, 4096)] == [512, 512, 1024, 4096, 4096]
    assert slots_for(3, 100, 512) == slots_for(3, 100, None) == 100 and slots_for(0, 37, 4) == 4


def test_inspect_tells_what_a_bundle_takes(bundle: Path) -> None:
    """Guards against a user who learns only from an error what fits."""
    shown = CliRunner().invoke(app, [str(bundle), "--device", "--max-batch", "4", "--context", "32", "--json"])
    facts = json.loads(shown.stdout)["device_memory"]
    assert shown.exit_code == 0 and (facts["sequences"], facts["context"]) == (4, 32) and "cpu" not in facts["targets"]
    assert facts["targets"]["cuda"]["total"] == required_memory(Bundle.open(bundle), "cuda", 4, 32).total
    table = CliRunner().invoke(app, [str(bundle), "--device"]).stdout
    assert "16 sequences of 64 tokens" in table and "cuda" in table
