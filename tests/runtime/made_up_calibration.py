"""A calibration written into a bundle's manifest, as `tide-export --calibration` would put it there."""

import json
from pathlib import Path
from typing import Any


def exit_after(checkpoint: int, threshold: float | None = 0.3) -> dict[str, Any]:
    """An exit whose identity head needs no graph of its own; ``threshold``: the certified one."""
    thresholds = {"exact_threshold": 0.2, "exit_threshold": threshold, "mlp_threshold": None}
    return {"checkpoint": checkpoint, "head": "identity", "router": "max_probability", **thresholds}


def calibrate(bundle: Path, exits: list[dict[str, Any]], **changes: Any) -> None:
    """Give ``bundle`` these exits; ``changes``: to the rest of the calibration."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    rest = {"draft_limit": 6, "recommended": "exact", "predicted": {}, "certificate": None, "costs": None}
    manifest["calibration"] = {"exits": exits, **rest, **changes}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
