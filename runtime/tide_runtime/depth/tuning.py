"""The constants of drafting and early exits, in one frozen dataclass. Tests and ablations inject another one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DepthTuning:
    """Constants that the policies ``exact`` and ``exit`` decide with.

    Args:
        text_draft_limit: most text drafts before a verification pass. They cost no evaluation, so they go further.
        head_draft_limit: most guesses of the draft head before a verification pass, and most exit drafts where the calibration
            names no limit: hardly one at the end of a longer chain is right. 0: the head never guesses.
        first_exit_drafts: exit drafts of a sequence's first cycle. The number doubles while all drafts are accepted.
        usual_hit_rates: (least matched tokens of a class, share of copied tokens that were right after so many), rising, from 68
            greedy texts of SmolLM2-135M-Instruct.
        usual_successor_rates: likewise for tokens from earlier replies, by the tokens before them: up to three, and as many more
            as such tokens were right without a break. From the replies to 120 tasks (`benchmarks.tasks`), each set in its order.
        successor_entries: of the table of earlier replies, which draft for requests of the same cache salt; 0: there is none.
        hit_rate_weight, hit_rate_memory: see `HitRates`.
        clock_rate: share of its error that a pass corrects prices by (`PassClock`), so that one noisy time decides nothing. With
            0, drafts depend on the text and the measured table only, and a run can be repeated.
        max_clock_tilt: bound of the correction, and of the error that is learned from: 12 tokens take 0.5 to 2.1 times as long.
        padding_penalty: cost of each token that pads a shorter sequence, in full steps of one sequence, besides what it takes. A
            sequence that gets ahead no longer shares its later drafts with the others.
        min_batch_speedup: exits are evaluated in a batch where at least this speedup is estimated. The estimate leaves out
            waiting, padding and the loop: on the demo model 8 sequences came to 0.5-0.65 of it.
        uncalibrated_speedup: expected speedup of exit drafts without a calibration.
        exit_expectation_weight: weight of the expectation under policy ``exit``, where an outcome is one token (see `Backoff`).
        backoff_decay: share of the past that the running speedup of exits keeps at each outcome.
        cooldown: tokens without speculation after it first lost; each further loss doubles it.
        settled_after_first_loop: of a looped model's tokens, share whose final guess is expected after the first loop; the other
            loops have equal shares of the rest.
        settled_rate: weight of a token in these shares.
        exit_room: most tokens that wait at one checkpoint under policy ``exit``; then the layers they skipped are run.
    """

    text_draft_limit: int = 12
    head_draft_limit: int = 6
    first_exit_drafts: int = 1
    usual_hit_rates: tuple[tuple[int, float], ...] = (
        (1, 0.24), (2, 0.53), (3, 0.69), (4, 0.77), (6, 0.86), (9, 0.91), (14, 0.96), (24, 0.99)
    )  # fmt: skip
    usual_successor_rates: tuple[tuple[int, float], ...] = ((1, 0.15), (2, 0.31), (3, 0.41), (4, 0.47), (6, 0.73), (9, 0.92))
    successor_entries: int = 65536
    hit_rate_weight: float = 4.0
    hit_rate_memory: float = 16.0
    clock_rate: float = 1 / 16
    max_clock_tilt: float = 0.3
    padding_penalty: float = 0.05
    min_batch_speedup: float = 1.3
    uncalibrated_speedup: float = 1.1
    exit_expectation_weight: float = 8.0
    backoff_decay: float = 0.9
    cooldown: int = 32
    settled_after_first_loop: float = 0.7
    settled_rate: float = 1 / 32
    exit_room: int = 64
