"""Bits of the inputs of integer products: 8 where a processor's products are exact with them, else 7."""

import subprocess
import sys

import numpy as np
import onnxruntime as ort
import pytest
from tide_runtime.backends.onnxruntime import activation_bits as module
from tide_runtime.backends.onnxruntime.activation_bits import EIGHT, SEVEN, ActivationBits, activation_bits
from tide_runtime.backends.onnxruntime.model_proto import integer_product


@pytest.mark.parametrize("bits", [EIGHT, SEVEN], ids=["8", "7"])
def test_steps(bits: ActivationBits) -> None:
    """The largest magnitude would fall off the range, or the range be left unused."""
    shares = np.array([-1, 0, 1], np.float32)
    integers = np.rint(shares / bits.step) + bits.zero_point
    half = 2 ** (bits.bits - 1)
    assert integers.tolist() == [1, half, 2 * half - 1]


def test_products_of_this_processor_are_exact() -> None:
    """Sums that overflow are wrong by as much as the largest products: the model would be another one."""
    bits, random = activation_bits(), np.random.default_rng(0)
    largest = 2**bits.bits
    matrix = random.integers(-127, 128, (576, 96)).astype(np.int8)
    matrix[:, :8] = 127
    for count in (1, 2, 3, 7, 16, 40):
        rows = random.integers(0, largest, (count, 576)).astype(np.uint8)
        rows[-1] = largest - 1
        session = ort.InferenceSession(integer_product(rows, matrix), providers=["CPUExecutionProvider"])
        np.testing.assert_array_equal(session.run(None, {})[0], rows.astype(np.int64) @ matrix)


def test_a_session_takes_seven_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are written for 8; the two initializers alone would be replaced by others."""
    options = ort.SessionOptions()
    added: dict[str, np.ndarray] = {}
    monkeypatch.setattr(type(options), "add_initializer", lambda _, name, value: added.update({name: value.numpy()}))
    module.set_activation_bits(options)
    assert set(added) == (set() if activation_bits() is EIGHT else {module.STEP, module.ZERO_POINT})
    monkeypatch.setattr(module, "activation_bits", lambda shared: SEVEN)
    module.set_activation_bits(options)
    assert added[module.ZERO_POINT] == 64 and added[module.STEP] == np.float32(1 / 63)


def test_a_process_that_shares_its_threads() -> None:
    """Breaks: tide-run and tide-serve, whose sessions share threads, load no bundle with integer products."""
    code = (
        "from tide_runtime.backends.onnxruntime.activation_bits import set_activation_bits\n"
        "from tide_runtime.backends.onnxruntime.threads import ThreadOptions, session_options\n"
        "set_activation_bits(session_options(ThreadOptions(1, shared=True), chained=False))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
