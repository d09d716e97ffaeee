"""The mask of cache slots that a token sees, for attention kernels without sliding window or causal mask.

Written as ``slot < end``: TensorRT-RTX 1.7 then also compiles a map of the cache tiles to skip, as for its own causal mask, so
that attention costs time in the valid slots. With ``slot <= place`` it fuses the mask elsewhere and reads all slots.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from tide_export.passes.graph_walk import array_initializer


def visible_slots(graph: ir.Graph, tape: Tape, slots: int, window: int) -> ir.Value:
    """[B, 1, S, slots] bool: token s of sequence b sees slot j when end - window <= j < end, with end = write_index[b] + s + 1.

    Args:
        window: in tokens; 0 for full causal attention.
    """

    def integers(name: str, numbers: int | list[int]) -> ir.Value:
        return array_initializer(graph, f"visible.{name}", np.array(numbers, np.int64))

    inputs = {value.name: value for value in graph.inputs}
    count = tape.op("Squeeze", [token_count(graph, tape), integers("first", [0])])
    steps = tape.op("Range", [integers("1", 1), tape.op("Add", [count, integers("1", 1)]), integers("1", 1)])
    end = tape.op("Add", [tape.op("Unsqueeze", [inputs["write_index"], integers("second", [1])]), steps])
    end = tape.op("Unsqueeze", [end, integers("around", [1, 3])])
    every = integers("every_slot", list(range(slots)))
    visible = tape.op("Less", [every, end])
    if window:
        oldest = tape.op("Sub", [end, integers(f"window_{window}", window)])
        visible = tape.op("And", [visible, tape.op("GreaterOrEqual", [every, oldest])])
    return visible


def token_count(graph: ir.Graph, tape: Tape) -> ir.Value:
    """[1]: S, the tokens per sequence in this step."""
    states = next(value for value in graph.inputs if value.name in ("hidden", "input_ids"))
    return tape.op("Shape", [states], {"start": 1, "end": 2})
