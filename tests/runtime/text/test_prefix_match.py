"""What a stream may not show yet, because a stop string, a tag or a call may begin there."""

import pytest
from tide_runtime.text.prefix_match import partial_match_length


@pytest.mark.parametrize(
    ("text", "phrases", "length"),
    [("a <", ["</think>"], 1), ("a </thi", ["</think>", "</x"], 5), ("aab", ["abab"], 2), ("abc", ["bcd", "cd"], 2),
     ("a<b", ["<c"], 0), ("</think>", ["</think>"], 0), ("", ["a"], 0), ("a", [], 0)],
)  # fmt: skip
def test_the_longest_beginning_of_a_phrase_is_held_back(text: str, phrases: list[str], length: int) -> None:
    """Breaks: a client sees a part of what ends an answer or of a tag; or waits for text that is certain."""
    assert partial_match_length(text, phrases) == length
