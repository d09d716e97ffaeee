"""Depth policies by name."""

from __future__ import annotations

from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.exact import ExactDepth
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.exit_wavefront import ExitWavefront, takes_rows
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import BackendFacts, LoadedPolicy
from tide_runtime.depth.wavefront import WavefrontDepth
from tide_runtime.errors import ParamsError


def make_policy(name: str, manifest: Manifest, options: DepthOptions, facts: BackendFacts | None = None) -> LoadedPolicy:
    """The policy ``name``: ``full``, ``exact``, ``exit``, or ``auto``, which is what the calibration recommends.

    Where that is ``full``, or there is no calibration, ``auto`` is ``exact`` without exits if passes were measured, as other
    drafts cost little then. ``auto`` is never ``exact`` without the same bits, as nothing that may change a text is a default;
    where the target rounds besides, ``exact`` runs as ``full``. With adapters no policy takes exits.

    An embedding model runs every layer.

    Raises ParamsError for an unknown name, or when the bundle lacks what the policy needs.
    """
    facts = facts or BackendFacts()
    with_exits = True
    if manifest.embedding is not None:
        if name not in ("auto", "full") or facts.adapted:
            wrong = "adapters are given" if facts.adapted else f"policy is {name!r}"
            raise ParamsError(f"{wrong}, and this is an embedding model, which runs whole as it is; leave that out")
        return FullDepth()
    if name == "auto":
        name = manifest.calibration.recommended if manifest.calibration is not None else "full"
        if name == "exit" and facts.adapted:
            name = "exact"
        if name == "full" and facts.pass_costs is not None:
            name = "exact"
            with_exits = False
        if name == "exact" and not facts.same_bits:
            name = "full"
    if facts.adapted and (name == "exit" or options.draft == "router"):
        raise ParamsError(
            f"{'policy exit' if name == 'exit' else 'draft router'} takes exits, which were calibrated for the model without "
            "adapters; use policy exact or full, with draft ngram, head, grammar or all"
        )
    with_exits = with_exits and not facts.adapted
    if name == "full" or (name == "exact" and facts.rounds and not facts.same_bits):
        return FullDepth()
    loops = facts.loop_costs if options.draft in ("all", "router") else None
    if name == "exact" and loops is not None:
        return WavefrontDepth(manifest, options, loops())
    if name == "exact":
        return ExactDepth(manifest, options, facts.pass_costs, with_exits, facts.same_bits)
    if name == "exit":
        if manifest.is_recurrent:
            raise ParamsError(
                "policy exit cannot run this model: a token that skips a recurrent layer leaves its state behind, and bringing "
                "it up to date takes most of the layer's work, so nothing would be saved; use policy exact, which drafts instead"
            )
        if loops is not None and takes_rows(manifest, options):
            return ExitWavefront(manifest, options, loops())
        return ExitDepth(manifest, options, facts.concurrency)
    raise ParamsError(f"policy is {name!r}; set it to one of: auto, full, exact, exit")
