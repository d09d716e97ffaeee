"""RMSNormalization: fused from the traced operators, and decomposed again."""

import onnx_ir as ir
import pytest
from export.passes.graphs import assert_same_results, assert_untouched, lowered, only, operators, parse, random_feeds

from tide_export.passes.rms_norm import decompose_rms_norm, fuse_rms_norm

SIZES = {"batch": 3, "seq": 7}


MEAN = """
    square = Pow(wide, two)
    mean = ReduceMean<keepdims = 1>(square, axis)
    shifted = Add(mean, epsilon)
    root = Sqrt(shifted)
    inverse = Reciprocal(root)
    normed = Mul(wide, inverse)"""


FORMS = {  # types of x and of the weight, how x is widened, what follows the norm; `Neg` stands for the layer that reads it
    "Llama in float32": ("float", "float", "wide = Identity(x)", "scaled = Mul(weight, normed)"),
    "Llama in half precision": (
        "float16",
        "float16",
        "wide = Cast<to = 1>(x)",
        "narrow = Cast<to = 10>(normed) scaled = Mul(weight, narrow)",
    ),
    "Gemma in half precision": (
        "float16",
        "float",
        "wide = Cast<to = 1>(x)",
        "product = Mul(normed, weight) scaled = Cast<to = 10>(product)",
    ),
}


TOLERANCE = {"float": 1e-6, "float16": 2e-3}


def norm(
    dtype: str, weight: str, widen: str, finish: str, mean: str = MEAN, channels: int = 11, weight_shape: str = ""
) -> ir.Model:
    return parse(
        f"""({dtype}[batch, seq, {channels}] x) => ({dtype}[batch, seq, {channels}] y)
        <float two = {{2.0}}, int64[1] axis = {{-1}}, float epsilon = {{0.25}}, {weight}[{weight_shape or channels}] weight> {{
            {widen} {mean} {finish}
            y = Neg(scaled)
        }}"""
    )


def llama(mean: str = MEAN, finish: str = FORMS["Llama in float32"][3], **shape: str) -> ir.Model:
    return norm("float", "float", "wide = Neg(x)", finish, mean, **shape)


@pytest.mark.parametrize("channels", [3, 11])
@pytest.mark.parametrize("form", FORMS)
def test_norm_is_one_operator(form, channels):
    """Hidden states would differ: another epsilon, a weight applied before rounding or after, a sum in half precision."""
    before = norm(*FORMS[form], channels=channels)
    after, report = lowered(fuse_rms_norm, before)
    assert (report.applied, report.skipped) == (1, [])
    assert not {"Pow", "ReduceMean", "Sqrt", "Reciprocal"} & set(operators(after))
    assert only(after, "RMSNormalization").attributes["epsilon"].value == 0.25
    assert_same_results(before, after, random_feeds(before, SIZES), TOLERANCE[FORMS[form][0]])


LEFT = {
    "the normed value is not multiplied by a weight": llama(finish="scaled = Add(normed, weight)"),
    "no x · 1/sqrt(mean(x²) + ε) around this mean": llama(mean=MEAN.replace("Mul(wide, inverse)", "Mul(x, inverse)")),
    "weight of shape [1] is not one number per channel": llama(weight_shape="1"),
    "weight is FLOAT, the hidden state FLOAT16": norm(
        "float16",
        "float",
        "wide = Cast<to = 1>(x)",
        "product = Mul(normed, weight) half = Abs(product) scaled = Cast<to = 10>(half)",
    ),
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_no_such_norm_is_left_and_reported(reason):
    """Another formula would be replaced by this one, or the export not tell why a norm stays slow."""
    assert_untouched(fuse_rms_norm, LEFT[reason], reason)


@pytest.mark.parametrize("mean", [MEAN.replace("axis", "places"), MEAN.replace("axis", "both")], ids=["tokens", "both"])
def test_a_mean_over_more_than_channels(mean):
    """A norm over tokens would become one over channels, whose shapes are the same."""
    model = parse(
        f"""(float[batch, seq, 7] x) => (float[batch, seq, 7] y)
        <float two = {{2.0}}, int64[1] places = {{1}}, int64[2] both = {{1, 2}}, float epsilon = {{0.25}}, float[7] weight> {{
            wide = Neg(x) {mean} scaled = Mul(weight, normed) y = Neg(scaled)
        }}"""
    )
    assert_untouched(fuse_rms_norm, model, "the mean is not one over channels")


def norms(channels: int, dtype: str = "float", second_epsilon: float = 0.5) -> ir.Model:
    """Two in a row; the last one's output is the graph's."""
    return parse(
        f"""({dtype}[batch, seq, {channels}] x) => ({dtype}[batch, seq, {channels}] y)
        <{dtype}[{channels}] first, {dtype}[{channels}] second> {{
            middle = RMSNormalization<axis = -1, epsilon = 0.000001, stash_type = 1>(x, first)
            y = RMSNormalization<axis = -1, epsilon = {second_epsilon}, stash_type = 1>(middle, second)
        }}"""
    )


@pytest.mark.parametrize("channels", [3, 11])
def test_norms_are_decomposed(channels):
    """Hidden states would differ, by one norm's epsilon or weight used for another."""
    before = norms(channels)
    after, report = lowered(decompose_rms_norm, before)
    assert (report.applied, report.skipped) == (2, [])
    assert operators(after) == {"Mul": 4, "ReduceMean": 2, "Add": 2, "Sqrt": 2, "Div": 2}
    assert_same_results(before, after, random_feeds(before, {"batch": 3, "seq": 7}), 1e-6)


def test_half_precision_is_left_and_reported():
    """The square of a state of 300 is past what half precision holds."""
    reason = "it norms FLOAT16, not float32"
    assert_untouched(decompose_rms_norm, norms(7, "float16"), reason, reason)
