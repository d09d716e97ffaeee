"""Depth policy that decodes requests in a loop on the device, and those that need the host after every token on the host.

Penalties, biases, grammars, log-probabilities and depth budgets need it. Stop strings do not: the engine drops the tokens that a
launch generated behind one, and nothing reads their keys and values. A sampled token that rounding leaves in doubt ends its row's
launch, and the host decides that one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.backends.device.control_flow import Compile, Execution, Launch, Node, While, conditions
from tide_runtime.backends.device.device_step import DeviceContext
from tide_runtime.depth.policy import DevicePlan, PromptChunk
from tide_runtime.device_loop.decode_loop import DecodeLoop, LoopExit
from tide_runtime.device_loop.exact_loop import MAX_LAUNCH_TOKENS, ExactLoop
from tide_runtime.device_loop.loop_kernels import LoopKernels
from tide_runtime.device_loop.loop_state import MAX_EOS
from tide_runtime.device_loop.text_state import MAX_DRAFTS
from tide_runtime.errors import DeviceMemoryError, TargetError, TideError
from tide_runtime.sequence import TokenSequence


@dataclass
class Drivers:
    """How a loop's program is run.

    Args:
        warm: makes the host run the first launches, in which libraries load and allocate what a capture must not.
        compile: captures the program for later launches; None: ``warm`` runs all of them.
        refused: the reason why the host decides, or None.
        execution: what ``compile`` made last, or None.
    """

    warm: Compile
    compile: Compile | None
    refused: str | None = None
    execution: Execution | None = None

    def compiled(self, program: Sequence[Node]) -> Launch:
        """The captured program, or one run by the host when the capture fails."""
        if self.compile is not None:
            try:
                return self._captured(self.compile(program), program).launch
            except TargetError as error:
                self.compile = None
                self.refused = announced(error)
        return self.warm(program).launch

    def _captured(self, execution: Execution, program: Sequence[Node]) -> Execution:
        """Note how ``program`` runs. Without conditional nodes the host reads the conditions inside a loop, the exits'."""
        self.execution = execution
        inner = [node for loop in program if isinstance(loop, While) for node in conditions(loop.body)]
        if execution.refusal is not None and inner and self.refused is None:
            self.refused = announced(TargetError(execution.refusal))
        return execution


def announced(error: TideError) -> str:
    """Warn about a fallback to the host, which would otherwise look like a slow GPU; returns the reason."""
    warnings.warn(f"{error}; decoding is driven from the host", RuntimeWarning, stacklevel=4)
    return str(error)


class DeviceLoopPolicy:
    """Runs ``plan`` as a `DecodeLoop` of ``turns`` and ``window``, or an `ExactLoop`, where the requests allow it."""

    def __init__(
        self,
        plan: DevicePlan,
        kernels: LoopKernels,
        turns: int,
        drivers: Drivers,
        window: int = 1,
    ) -> None:
        self.plan = plan
        self.inner = plan.host
        self.name = plan.host.name
        self.exits = [LoopExit(early_exit, threshold) for early_exit, threshold in plan.exits]
        self.drivers = drivers
        self._kernels = kernels
        self._turns = turns
        self._window = window
        self._without_loops: str | None = None
        # What the host's policy says of itself holds for the loop.
        self.can_resume = plan.host.can_resume
        self.runs_every_layer = plan.host.runs_every_layer
        self.uses_draft_head = plan.host.uses_draft_head
        self.loops_as_rows = plan.host.loops_as_rows
        self.check_params = plan.host.check_params
        self.reusable_tokens = plan.host.reusable_tokens

    @property
    def refused(self) -> str | None:
        """Reason why the host decodes, or None."""
        return self._without_loops or self.drivers.refused

    @property
    def lookahead(self) -> int:
        return self._turns if self.plan.drafts is None else MAX_LAUNCH_TOKENS

    def step(
        self, context: ExecutionContext, decoding: Sequence[TokenSequence], prompts: Sequence[PromptChunk]
    ) -> list[list[int]]:
        device_context = cast(DeviceContext, context)
        drives = not prompts and self._is_eligible(device_context, decoding)
        loop = self._loop(device_context, decoding) if drives else None
        if loop is None:
            return self.inner.step(context, decoding, prompts)
        tokens = loop.launch(decoding)
        # Their first token is in doubt, or their logits are not finite, for which the inner policy raises.
        in_doubt = [seq for seq, new in zip(decoding, tokens, strict=True) if not new]
        decided = iter(self.inner.step(context, in_doubt, []) if in_doubt else [])
        return [new or next(decided) for new in tokens]

    def _is_eligible(self, context: DeviceContext, sequences: Sequence[TokenSequence]) -> bool:
        """Whether a loop on the device can decode these sequences together."""
        if not all(_is_device_eligible(seq) and _eos(seq) == _eos(sequences[0]) for seq in sequences):
            return False
        if [seq.batch_index for seq in sequences] != list(range(len(sequences))):  # a prompt has a row between them
            return False
        last = context.caches.limit - self._spare_slots
        return all(seq.num_cached_tokens <= last and self.plan.can_start(seq) for seq in sequences)

    @property
    def _spare_slots(self) -> int:
        """Those that a launch needs behind what is cached of a sequence. Pending tokens are padded to the window's slots, drafts
        to those of a pass."""
        if self.plan.drafts is not None:
            return MAX_DRAFTS + 1
        return self._turns + self._window if self.exits else 0

    def _loop(self, context: DeviceContext, sequences: Sequence[TokenSequence]) -> _DrivenLoop | None:
        """A loop for at least as many sequences, rounded up to a power of two so that few graphs are captured.

        None when the kernels cannot be built, which then holds for all sizes, or when memory is short beside this context.
        """
        size = min(context.capacity, 1 << (len(sequences) - 1).bit_length())
        slots = max(seq.num_cached_tokens for seq in sequences) + self.lookahead + self._window
        with context.backend.device.lock:
            context.caches.reserve(min(slots, context.caches.limit), size)
        samples = not all(seq.params.greedy for seq in sequences)
        key = (self, size, context.caches.slots, samples)
        if key not in context.attached and self._without_loops is None:
            try:
                with context.backend.device.lock:
                    loop = self._new_loop(context, size, samples)
            except DeviceMemoryError as error:
                context.attached[key] = None
                announced(error)
            except TideError as error:
                self._without_loops = announced(error)
            else:
                context.attached[key] = _DrivenLoop(loop, self.drivers)
        return context.attached.get(key)

    def _new_loop(self, context: DeviceContext, size: int, samples: bool) -> DecodeLoop | ExactLoop:
        if self.plan.drafts is not None:
            return ExactLoop(context, size, self._kernels, self._turns, self.plan.drafts, samples)
        return DecodeLoop(context, size, self._kernels, self._turns, self.exits, self._window, samples)


@dataclass
class _DrivenLoop:
    """A loop and the function that runs its program, which is captured once every graph of it has run."""

    loop: DecodeLoop | ExactLoop
    drivers: Drivers
    run: Launch | None = None

    def launch(self, sequences: Sequence[TokenSequence]) -> list[list[int]]:
        """Advance ``sequences``; returns the new tokens of each."""
        run = self.run or self.drivers.warm(self.loop.program).launch
        found = self.loop.launch(run, sequences, _eos(sequences[0]))
        if self.run is None:
            self.run = self.drivers.compiled(self.loop.program)
        for sequence, tokens in zip(sequences, found, strict=True):
            sequence.num_cached_tokens += len(tokens)
            self.loop.context.ends.reach(sequence.batch_index, sequence.num_cached_tokens)
        return found


def _is_device_eligible(sequence: TokenSequence) -> bool:
    """Whether the device can select the sequence's tokens and detect its end."""
    params = sequence.params
    needs_host = params.logprobs or params.depth_budget is not None
    return not (params.changes_logits or needs_host) and len(_eos(sequence)) <= MAX_EOS


def _eos(sequence: TokenSequence) -> frozenset[int]:
    return frozenset() if sequence.params.ignore_eos else sequence.eos
