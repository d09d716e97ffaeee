"""Generation parameters: a wrong one must be refused with its name, not change the output silently."""

import dataclasses
import math

import pytest
from tide_runtime.errors import ParamsError, TideError
from tide_runtime.generation_params import GenerationParams


def test_defaults_are_greedy_and_end_at_the_models_eos():
    """Breaks: a caller who sets nothing gets random text, or text that never ends."""
    params = GenerationParams()
    assert params.greedy and params.eos_token_ids is None and not params.ignore_eos


def test_any_temperature_above_zero_samples():
    """Breaks: a low temperature is taken for greedy."""
    assert not GenerationParams(temperature=1e-6).greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 2.5),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 1.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", "1"),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", (("1", 1.0),)),
        ("logit_bias", 5),
        ("grammar", "x"),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("seed", -1),
        ("seed", 1.5),
        ("stop", "###"),
        ("stop", ("",)),
        ("stop", (1,)),
        ("eos_token_ids", 2),
        ("eos_token_ids", (-1,)),
        ("ignore_eos", 1),
        ("logprobs", -1),
        ("logprobs", None),
    ],
)
def test_bad_value_is_refused_by_name(field, value):
    """Breaks: a typo in a request runs with a meaning nobody asked for."""
    with pytest.raises(ParamsError) as caught:
        GenerationParams(**{field: value})
    assert str(caught.value).startswith(f"{field} is {value!r}; set it to ")


def test_errors_are_both_ours_and_value_errors():
    """Breaks: the CLI shows a traceback, or callers that expect ValueError from a bad config miss it."""
    with pytest.raises(ValueError):
        GenerationParams(top_k=-1)
    assert issubclass(ParamsError, TideError) and ParamsError.exit_code == 2


def test_lists_from_json_become_tuples():
    """Breaks: parameters read from a JSON request are refused, or compare unequal to the same ones from Python."""
    parsed = GenerationParams(stop=["a", "b"], eos_token_ids=[1, 2])
    assert parsed == GenerationParams(stop=("a", "b"), eos_token_ids=(1, 2))
    assert hash(parsed)


def test_params_cannot_change_after_the_check():
    """Breaks: a value set later skips the check."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        GenerationParams().top_k = -1
