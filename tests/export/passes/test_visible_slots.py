"""The mask of cache slots that a token sees, against its definition."""

import numpy as np
import pytest
from export.passes.graphs import finish, parse, run
from onnx_ir.tape import Tape

from tide_export.passes.attention_products import visible_slots


@pytest.mark.parametrize("states", ["hidden", "input_ids"])
@pytest.mark.parametrize("window", [0, 1, 3, 11])
@pytest.mark.parametrize("seq", [1, 7])
def test_mask_is_the_definition(states, window, seq):
    """A token would read slots of the future, or of another request that had the cache before; or miss its own."""
    model = parse(f"(int64[batch, seq] {states}, int64[batch] write_index) => (bool[batch, 1, seq, 11] visible) {{}}")
    tape = Tape()
    finish(model, tape, visible_slots(model.graph, tape, 11, window))
    lengths = np.array([0, 2, 4])
    found = run(model, {states: np.zeros((3, seq), np.int64), "write_index": lengths})["visible"]
    place = (lengths[:, None] + np.arange(seq))[:, None, :, None]
    slot = np.arange(11)
    np.testing.assert_array_equal(found, (slot <= place) & (slot > place - (window or 99)))
