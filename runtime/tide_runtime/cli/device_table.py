"""What a bundle's targets take of a device's memory, and whether that is free here: ``tide-inspect --device``."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from tide_runtime.backends.required_memory import required_memory, shortage
from tide_runtime.bundle import Bundle
from tide_runtime.cli.tables import human_size, titled_table
from tide_runtime.errors import TargetError

_PROCESSOR = "onnxruntime-cpu"


def device_facts(bundle: Bundle, rows: int, context: int | None) -> dict[str, Any]:
    """Facts as JSON values, sizes in bytes, for ``rows`` sequences of ``context`` tokens; None: of max_seq_len."""
    gpu, free = _free_here()
    targets = {}
    for name, info in bundle.manifest.targets.items():
        if info.backend == _PROCESSOR:
            continue
        needed = required_memory(bundle, name, rows, context)
        facts: dict[str, int | str] = {
            "weights": needed.weights,
            "kv_per_sequence": needed.row,
            "steps": needed.steps,
            "total": needed.total,
        }
        if free is not None:
            fits = needed.least <= free
            facts |= {"sequences_here": needed.rows_within(free), "here": "fits" if fits else shortage(bundle, name, free)}
        targets[name] = facts
    context = min(context or bundle.manifest.max_seq_len, bundle.manifest.max_seq_len)
    return {"sequences": rows, "context": context, "gpu": gpu, "free": free, "targets": targets}


def device_tables(facts: dict[str, Any]) -> list[Table]:
    """What each target takes, and whether that is free here."""
    columns = ("target", "weights", "keys and values of one", "of all", "a step", "in all")
    title = f"Memory on a device, about: {facts['sequences']} sequences of {facts['context']:,} tokens"
    sizes = titled_table(title, columns, right=columns[1:])
    here = titled_table("Here", header=False)
    for name, one in facts["targets"].items():
        rows = one["kv_per_sequence"] * facts["sequences"]
        parts = (one["weights"], one["kv_per_sequence"], rows, one["steps"], one["total"])
        sizes.add_row(name, *map(human_size, parts))
        here.add_row(name, _here(facts, one))
    return [sizes, here]


def _here(facts: dict[str, Any], one: dict[str, Any]) -> str:
    if facts["free"] is None:
        return (
            "not checked: no GPU with a driver here"
            if facts["gpu"] is None
            else "not checked: the GPU has the processor's memory"
        )
    if one["here"] != "fits":
        return f"does not fit: {one['here']}"
    most = one["sequences_here"]
    few = f"; --max-batch {most}, or requests wait" if most < facts["sequences"] else ""
    return f"{human_size(facts['free'])} of {facts['gpu']} are free: {most} sequences fit{few}"


def _free_here() -> tuple[str | None, int | None]:
    """Name of the first GPU and its free bytes; None for either where it is not known."""
    from tide_runtime.backends.device.cuda_device import CudaDevice

    try:
        device = CudaDevice()
        return device.name, device.free_memory()
    except TargetError:
        return None, None
