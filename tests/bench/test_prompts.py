"""Which prompts are continued."""

import json
from pathlib import Path

import pytest
from tide_bench.prompts import joined, read_prompts, windows
from tide_runtime.errors import PromptError


def test_prompts_are_cut_to_one_length_and_reused() -> None:
    """Rows of a batch would differ in length, which other libraries cannot take, or a short file end the run."""
    assert windows([[1], [1, 2, 3], [4, 5]], 2, 3) == [[2, 3], [4, 5], [2, 3]]


def test_too_short_prompts_are_refused() -> None:
    """The user would not learn that the file does not fit the options."""
    with pytest.raises(PromptError, match="longest has 2"):
        windows([[1, 2]], 3, 1)


def test_long_contexts_are_made_of_several_prompts() -> None:
    """--long would need a file of long prompts."""
    assert joined([[1, 2], [3], [4, 5, 6], [7]], 3) == [[1, 2, 3], [4, 5, 6]]


def test_json_lines_of_ids_need_no_tokenizer(tmp_path: Path) -> None:
    """A bundle without tokenizer could not be compared."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"ids": [3, 4]}) + "\n")
    assert read_prompts(path, None) == [[3, 4]]


@pytest.mark.parametrize(
    ("line", "message"), [("{", "is not JSON"), ('{"text": "a"}', "neither"), ('{"prompt": "a"}', "tokenizer")]
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, message: str) -> None:
    """The user would search the whole file."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(PromptError, match=message):
        read_prompts(path, None)
