"""Depth policies by name."""

from __future__ import annotations

from tide_runtime.bundle.calibration import CostTable
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.exact import ExactDepth
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import LoadedPolicy
from tide_runtime.errors import ParamsError


def make_policy(
    name: str,
    manifest: Manifest,
    options: DepthOptions,
    concurrency: int = 1,
    passes: CostTable | None = None,
    same_bits: bool = True,
    rounds: bool = False,
) -> LoadedPolicy:
    """The policy ``name`` for ``concurrency`` sequences at once.

    Args:
        name: ``full``, ``exact``, ``exit``, or ``auto``: what the calibration recommends. Where that is ``full``, or there is no
            calibration, ``auto`` is ``exact`` without exits if ``passes`` are known, as other drafts cost little then.
        passes: what passes through all layers take on this machine, if measured.
        same_bits: a token's logits do not depend on what shares its launch. Otherwise ``auto`` is not ``exact``, as nothing that
            may change a text is a default.
        rounds: the target rounds to few bits. Without ``same_bits`` drafts would change many texts there, so ``exact`` runs as
            ``full``.

    Raises ParamsError for an unknown name, or when the bundle lacks what the policy needs.
    """
    with_exits = True
    if name == "auto":
        name = manifest.calibration.recommended if manifest.calibration is not None else "full"
        if name == "full" and passes is not None:
            name, with_exits = "exact", False
        if name == "exact" and not same_bits:
            name = "full"
    if name == "full" or (name == "exact" and rounds and not same_bits):
        return FullDepth()
    if name == "exact":
        return ExactDepth(manifest, options, passes, with_exits, same_bits)
    if name == "exit":
        return ExitDepth(manifest, options, concurrency)
    raise ParamsError(f"policy is {name!r}; set it to one of: auto, full, exact, exit")
