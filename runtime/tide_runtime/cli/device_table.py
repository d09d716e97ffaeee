"""What a bundle's targets take of a device's memory, and whether that is free here: ``tide-inspect --device``."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from tide_runtime.backends.required_memory import required_memory, shortage
from tide_runtime.bundle import Bundle
from tide_runtime.cli.engines_table import human_size
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
        facts = {"weights": needed.weights, "kv_per_sequence": needed.row, "steps": needed.steps, "total": needed.total}
        if free is not None:
            fits = needed.least <= free
            facts |= {"sequences_here": needed.rows_within(free), "here": "fits" if fits else shortage(bundle, name, free)}
        targets[name] = facts
    context = min(context or bundle.manifest.max_seq_len, bundle.manifest.max_seq_len)
    return {"sequences": rows, "context": context, "gpu": gpu, "free": free, "targets": targets}


def device_table(facts: dict[str, Any]) -> Table:
    title = f"Memory on a device, about: {facts['sequences']} sequences of {facts['context']:,} tokens"
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("target", "weights", "keys and values of one", "of all", "a step", "in all"):
        table.add_column(column, justify="left" if column == "target" else "right", overflow="fold")
    table.add_column("here", overflow="fold")
    for name, one in facts["targets"].items():
        rows = one["kv_per_sequence"] * facts["sequences"]
        sizes = (one["weights"], one["kv_per_sequence"], rows, one["steps"], one["total"])
        table.add_row(name, *map(human_size, sizes), _here(facts, one))
    return table


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
