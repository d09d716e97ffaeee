"""Steps over 1, 2, 4, … tokens of each sequence in a loop on the device, of which a `Switch` runs one."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tide_runtime.backends.device.arena import DeviceBuffers
from tide_runtime.backends.device.control_flow import Run
from tide_runtime.backends.device.device_step import DeviceContext, DeviceStep
from tide_runtime.backends.device.element_types import ELEMENT_TYPES
from tide_runtime.backends.step_arrays import StepShape
from tide_runtime.device_loop.loop_kernels import ChooseToken, LoopKernels, NextInputs
from tide_runtime.device_loop.loop_state import LoopState


class PaddedSteps:
    """Steps whose outputs, and the inputs that kernels write (``kernel_inputs``), have the addresses of those of ``widest``.

    Args:
        sizes: tokens of each sequence in each of ``steps``, rising.
        buffers: memory for the outputs.
        all_logits: compute the logits of all tokens, not of one of each sequence.
    """

    def __init__(
        self,
        context: DeviceContext,
        batch_size: int,
        sizes: Sequence[int],
        kernel_inputs: Sequence[str],
        buffers: DeviceBuffers,
        all_logits: bool = False,
    ) -> None:
        self._kernel_inputs = kernel_inputs
        self.steps: list[DeviceStep] = []
        for tokens in reversed(sizes):
            counts = [tokens] * batch_size
            num_logits = counts if all_logits else [1] * batch_size
            step = DeviceStep(context, StepShape.of(0, counts, num_logits), buffers, captured=True)
            step.begin(counts, num_logits, 0)
            step.positions.place([0] * batch_size)
            step.assume_full_caches()
            step.send()  # inputs that no kernel changes
            self.steps.insert(0, step)
            step.block.pointers.update({name: self.widest.block.pointers[name] for name in kernel_inputs})

    @property
    def widest(self) -> DeviceStep:
        return self.steps[-1]

    @property
    def inputs(self) -> NextInputs:
        """What kernels write."""
        return next_inputs(self.widest, self._kernel_inputs)

    def warm_up(self, graphs: Sequence[str], num_cached_tokens: Sequence[int]) -> None:
        """Run ``graphs`` once in every step, so that a capture meets no lazy initialization. The keys and values that this writes
        lie behind those of each sequence."""
        shared = self.widest.block
        for step in self.steps:
            step.positions.place(num_cached_tokens)
            shared.wait_until_writable()
            for name in self._kernel_inputs:
                if (values := step.positions.arrays.get(name)) is not None:
                    shared.host[name].reshape(-1)[: values.size] = values.ravel()
            shared.send()
            for name in graphs:
                step.enqueue(name)


def runs_of(step: DeviceStep, graphs: Sequence[str]) -> list[Run]:
    fixed = step.context.backend.fixed_stream
    return [Run(name, lambda stream, name=name: step.enqueue(name, stream), fixed) for name in graphs]  # type: ignore[misc]


def choice_of(kernels: LoopKernels, state: LoopState, step: DeviceStep, graph: str) -> Run:
    """The choice of tokens from the logits of ``graph``, in place of their argmax: sequences need not be greedy."""
    logits = step.tensors(graph, ["logits"])["logits"]
    tokens = prod(logits.shape[:-1]) // state.batch_size
    choice = ChooseToken(logits.pointer, logits.element, logits.shape[-1], step.address("token"), tokens)
    return Run("choose_token", kernels.choose_token(state, choice))


def next_inputs(step: DeviceStep, names: Sequence[str]) -> NextInputs:
    types = {name: ELEMENT_TYPES[step.block.host[name].dtype.name] for name in names}
    return NextInputs({name: step.block.pointers[name] for name in names}, types)
