"""Launching `draft_verify`: number of accepted drafts of each row, and the start of its next step."""

from __future__ import annotations

from typing import Any

from tide_plugins.launch.kernel_call import KernelCall
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.launch.prepared_launch import PreparedLaunch
from tide_plugins.launch.tensor_contract import ELEMENT, Tensor
from tide_plugins.params import DraftVerifyParams
from tide_plugins.plans import plan_draft_verify

TENSORS = (
    Tensor("drafts", "i64", ("rows", "width")),
    Tensor("draft_count", "i32", ("rows",)),
    Tensor("deep_tokens", "i64", ("rows", "width+1"), optional=True),
    Tensor("probabilities", ELEMENT, ("rows", "width+1", "vocab"), optional=True),
    Tensor("proposals", ELEMENT, ("rows", "width", "vocab"), optional=True),
    Tensor("seed", "u64", ("rows",), optional=True),
    Tensor("eos", "i64", ("eos_count",), optional=True),
    Tensor("limit", "i64", ("rows",)),
    Tensor("length", "i64", ("rows",), output=True),
    Tensor("last_token", "i64", ("rows",), output=True),
    Tensor("finished", "u8", ("rows",), output=True),
    Tensor("accepted", "i32", ("rows",), output=True),
    Tensor("emitted", "i32", ("rows",), output=True),
    Tensor("tokens", "i64", ("rows", "width+1"), output=True),
    Tensor("running", "i32", output=True),
)


def prepare_draft_verify(
    library: KernelLibrary, *, stream: Any, graph_condition: int | None = None, **tensors: Any
) -> PreparedLaunch:
    """Check the tensors and prepare the launch; the rule is in csrc/draft_verify.cuh.

    Args:
        stream: the stream that will use the tensors, on which scratch memory is allocated.
        graph_condition: ``cudaGraphConditionalHandle`` to set to the number of rows that are not finished.
        tensors: the names, dtypes and shapes in `TENSORS`. Greedy verification takes ``deep_tokens``; sampling takes
            ``probabilities`` and ``seed``, and ``proposals`` unless drafts are deterministic.

    Raises:
        ParamsError: a tensor breaks the contract, or greedy and sampling inputs are mixed.
        TargetError: the kernel cannot be built for this GPU, or sets no graph condition there.
    """
    call = KernelCall(library, "draft_verify", TENSORS, tensors, stream)
    sampling = call.array("probabilities") is not None
    if sampling:
        call.require(call.array("seed") is not None, "sampling needs seed beside probabilities")
        call.require(call.array("deep_tokens") is None, "deep_tokens belong to greedy verification; leave them out when sampling")
    else:
        call.require(call.array("deep_tokens") is not None, "expected deep_tokens (greedy), or probabilities and seed (sampling)")
        call.require(call.array("proposals") is None, "proposals are of use only when sampling; leave them out")
    rows, vocab = call.size("rows"), call.size("vocab")
    params = DraftVerifyParams(rows=rows, width=call.size("width"), vocab=vocab, eos_count=call.size("eos_count"))
    call.set_condition(params, graph_condition)
    plan = plan_draft_verify(rows, vocab, sampling)
    return call.prepare(params, {"draft_verify": plan}, {"counters": 4 * plan.counters})
