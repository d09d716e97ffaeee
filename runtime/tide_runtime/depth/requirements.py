"""What policies cannot do with a bundle or a request: the errors."""

from __future__ import annotations

from tide_runtime.bundle.manifest import Manifest, kv_fill_graph
from tide_runtime.depth.options import DepthOptions
from tide_runtime.errors import ParamsError
from tide_runtime.generation_params import GenerationParams


def check_fills(manifest: Manifest) -> None:
    """Raise ParamsError when a graph that projects keys and values is missing."""
    exits = manifest.calibration.exits if manifest.calibration is not None else []
    missing = {kv_fill_graph(info) for info in exits} - {graph.name for graph in manifest.graphs}
    if missing:
        raise ParamsError(
            f"projecting keys and values needs the graphs {', '.join(sorted(missing))}, which this bundle has not; export the "
            "model again, for a target that has them (cpu), or leave out kv propagate and prefill_exit"
        )


def check_tails(manifest: Manifest) -> None:
    """Raise ParamsError when exits run a tail."""
    if manifest.calibration is not None and manifest.calibration.tail_layers:
        raise ParamsError(
            "prefill_exit cannot evaluate exits that run the model's last layers, whose caches they fill in the text's order; "
            "leave it out, or calibrate with --heads identity,linear"
        )


def too_deep(deepest: int, options: DepthOptions) -> str:
    """Why no exit is left at ``options.min_depth``; ``deepest``: checkpoint of the last one."""
    return f"min_depth is {options.min_depth}, the deepest exit comes after {deepest} layers; set it to at most {deepest}"


def no_exit(manifest: Manifest) -> str:
    """Why there is no exit that may be taken."""
    if manifest.calibration is None:
        return (
            "policy exit needs a calibration, which this bundle has not; make one with "
            "tide-calibrate MODEL --data DATA --out calib/ and export again with --calibration calib/"
        )
    if not manifest.calibration.exits:
        return (
            "policy exit cannot stop anywhere: the calibration found no exit that agrees early enough to pay for its cut; "
            "use policy full or exact"
        )
    return (
        "policy exit has no certified threshold in this bundle; calibrate with a larger --max-disagreement or more data, "
        "or set a threshold yourself (threshold=…), which no certificate covers"
    )


def refuse_depth_budget(policy: str, params: GenerationParams) -> None:
    """Raise ParamsError where a request has a depth budget: ``policy`` promises the model's own output."""
    if params.depth_budget is not None:
        raise ParamsError(
            f"depth_budget is set, and policy {policy} promises the model's own output, which takes every layer; "
            "leave it out, or load the engine with policy exit"
        )
