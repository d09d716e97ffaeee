"""A speculator with made-up prices, and sequences that run nowhere."""

from dataclasses import replace

from runtime.numpy_backend import tiny_manifest
from runtime.tiny_generation import Request, make_row
from runtime.tiny_transformer import TinyTransformer
from tide_runtime.bundle.calibration import CostTable, DraftHeadInfo, ExitInfo
from tide_runtime.depth.executor import Executor
from tide_runtime.depth.frontier import Frontier
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.speculation.record import SpeculativeSequence, TrackRecord
from tide_runtime.depth.speculation.speculator import Speculator
from tide_runtime.depth.tuning import DepthTuning
from tide_runtime.generation_params import GenerationParams

MODEL = TinyTransformer(0, (1.0, 1.0), 11, 96)


def made_up_speculator(
    passes: CostTable | None,
    exits: tuple[ExitInfo, ...] = (),
    head: DraftHeadInfo | None = None,
    tuning: DepthTuning | None = None,
    follows_clock: bool = True,
) -> Speculator:
    manifest = tiny_manifest(MODEL, [1], exits)
    manifest = replace(manifest, draft_head=head)
    options = DepthOptions(tuning=tuning or DepthTuning())
    return Speculator(manifest, options, Executor(manifest), passes, with_exits=True, follows_clock=follows_clock)


def made_up_state(speculator: Speculator, head_room: int = 0) -> SpeculativeSequence:
    """A sequence of three tokens with room for 60 more; its draft head may guess ``head_room``."""
    row = make_row(Request((1, 2, 3), GenerationParams(max_new_tokens=60), 0), tiny_manifest(MODEL, [1]))
    record = TrackRecord(speculator.tuning, 1.0, speculator.head.info)
    return SpeculativeSequence(row, Frontier(2, 1, 1, row.tokens, 3), record=record, head_room=head_room)
