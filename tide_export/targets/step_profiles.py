"""Optimization profiles of engines: decode steps with few tokens per sequence, and prefill steps."""

from __future__ import annotations

from tide_runtime.bundle.manifest import ProfileInfo

_MAX_DRAFTS = 12  # drafts that `exact` verifies in one step, text drafts included, unless the calibration has more
_PROMPT_TOKENS = 512  # the runtime's prefill step


def step_profiles(max_batch: int, draft_limit: int, max_seq_len: int) -> list[ProfileInfo]:
    """Profiles ``decode`` and ``prefill`` for up to ``max_batch`` sequences; a decode step has one token more than drafts."""
    drafts = min(max(draft_limit, _MAX_DRAFTS) + 1, max_seq_len)
    prompt = min(_PROMPT_TOKENS, max_seq_len)
    return [
        ProfileInfo("decode", [1, 1, max_batch], [1, 1, drafts]),
        ProfileInfo("prefill", [1, 1, max_batch], [1, prompt, prompt]),
    ]
