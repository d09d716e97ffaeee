"""The kinds of steps that engines are optimized for: decoding, where few tokens of each row are due, and prompts."""

from __future__ import annotations

from tide_runtime.bundle.manifest import ProfileInfo

_MOST_DRAFTS = 12  # what `exact` verifies at once, copied tokens included, where the calibration does not say more
_PROMPT_TOKENS = 256  # the runtime's prefill step


def step_profiles(max_batch: int, draft_limit: int, max_seq_len: int) -> list[ProfileInfo]:
    """Profiles ``decode`` and ``prefill`` for up to ``max_batch`` rows; a decode step takes drafts and the token behind them."""
    drafts = min(max(draft_limit, _MOST_DRAFTS) + 1, max_seq_len)
    prompt = min(_PROMPT_TOKENS, max_seq_len)
    return [
        ProfileInfo("decode", [1, 1, max_batch], [1, 1, drafts]),
        ProfileInfo("prefill", [1, 1, max_batch], [1, prompt, prompt]),
    ]
