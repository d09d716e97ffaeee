"""The constants of drafting and early exits, in one frozen dataclass. Tests and ablations inject another one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DepthTuning:
    """Constants that the policies ``exact`` and ``exit`` decide with.

    Args:
        draft_limit: most exit drafts before a verification pass, without a calibration.
        text_draft_limit: most text drafts before a verification pass. They cost no evaluation, so they go further.
        first_speculative_tokens: exit drafts of a sequence's first cycle. The number doubles while all drafts are accepted.
        hit_rate_weight, hit_rate_memory: see `HitRates`.
        loss_allowance, loss_share: passes that text drafts and the draft head may lose in a sequence, and for each of its tokens
            besides (`Ledger`): a reply of 10 tokens is at most 3% slower, by the measured costs, whatever drafts it got.
        observe_passes: correct the prices of passes by the time that they take (`ObservedPasses`), where no exits draft. Without
            it, drafts depend on the text and the measured table only, so that a run can be repeated.
        head_draft_limit: most guesses of the draft head before a verification pass.
        pool_tokens: of recent outputs that draft for other requests of the same cache salt; 0: none.
        draft_lengths: most text drafts of one sequence, tried in turn: sequences of a batch wait for the longest.
        padding_penalty: cost of each token that pads a shorter sequence, in full steps of one sequence, besides what it takes. A
            sequence that gets ahead no longer shares its later drafts with the others.
        least_batch_speedup: exits are evaluated in a batch where at least this speedup is estimated. The estimate leaves out
            waiting, padding and the loop: on the demo model 8 sequences came to 0.5-0.65 of it.
        least_sampled_speedup: exits are evaluated for sampled text where at least this speedup is predicted for greedy text.
            Sampled text of the demo models gained about a fifth as much, and finding that out cost 2%.
        uncalibrated_speedup: expected speedup of exit drafts without a calibration.
        exit_expectation_weight: weight of the expectation under policy ``exit``, where an outcome is one token (see `Backoff`).
        cooldown, longest_cooldown: tokens without speculation after it lost, at first and at most; each loss doubles it.
        exit_room: most tokens that wait at one checkpoint under policy ``exit``; then the layers they skipped are run.
    """

    draft_limit: int = 8
    text_draft_limit: int = 12
    first_speculative_tokens: int = 1
    hit_rate_weight: float = 4.0
    hit_rate_memory: float = 16.0
    loss_allowance: float = 0.1
    loss_share: float = 0.02
    observe_passes: bool = True
    head_draft_limit: int = 6
    pool_tokens: int = 8192
    draft_lengths: tuple[int, ...] = (1, 2, 3, 4, 6, 9, 64)
    padding_penalty: float = 0.05
    least_batch_speedup: float = 1.3
    least_sampled_speedup: float = 1.4
    uncalibrated_speedup: float = 1.1
    exit_expectation_weight: float = 8.0
    cooldown: int = 32
    longest_cooldown: int = 512
    exit_room: int = 64
