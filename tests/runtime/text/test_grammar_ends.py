"""What a JSON schema allows can be finished, or the schema is refused before anything is written."""

import json
from pathlib import Path
from typing import Any

import pytest
from tide_runtime.errors import GrammarError
from tide_runtime.text.grammar import Grammar, GrammarCompiler
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NULL = {"type": "null"}
CLOSED = {"type": "object", "additionalProperties": False}
NAMED = {**CLOSED, "properties": {"a": NULL, "b": NULL}, "required": ["a", "b"]}
ENDLESS = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    path: Path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    tokenizer.save(str(path))
    return GrammarCompiler(path, tokenizer.get_vocab_size(), [tokenizer.token_to_id("<eos>")])


def num_valid(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> int:
    return compiler.start(grammar).num_valid(tokenizer.encode(text).ids)


@pytest.mark.parametrize("embedded", [False, True], ids=["json", "lark"])
@pytest.mark.parametrize(
    ("schema", "text", "goes_on"),
    [
        ({**NAMED, "patternProperties": {"^[ab]$": NULL}}, '{"a": null, "b": null', False),
        ({**CLOSED, "properties": {"o": {**NAMED, "patternProperties": {"^a$": NULL}}}}, '{"o": {"a": null, "b": null', False),
        ({**NAMED, "patternProperties": {"^[abc]$": NULL}}, '{"a": null, "b": null', True),
        (NAMED, '{"a": null', True),
    ],
)
def test_no_comma_where_no_name_can_follow(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], text: str, goes_on: bool, embedded: bool
) -> None:
    """Breaks: a model that writes the comma ends in an error, after all of the answer was computed."""
    grammar = Grammar.lark(f"start: value\nvalue: %json {json.dumps(schema)}") if embedded else Grammar.json_schema(schema)
    style = (", ", ",")[embedded]
    text = text.replace(", ", style).replace(": ", ":") if embedded else text
    assert num_valid(compiler, tokenizer, grammar, text) == len(text)
    assert (num_valid(compiler, tokenizer, grammar, text + style) == len(text + style)) == goes_on


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        ({**ENDLESS, "$defs": {"n": ENDLESS}}, False),
        ({"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": ENDLESS}}, False),  # once begun
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}}}, False),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [ENDLESS, NULL]}}}, True),
        ({"$ref": "#/$defs/n", "$defs": {"n": {**ENDLESS, "required": []}}}, True),
        ({"type": "object", "properties": {"n": {"$ref": "#"}}}, True),
    ],
)
def test_references_that_never_end_are_refused(compiler: GrammarCompiler, schema: dict[str, Any], ends: bool) -> None:
    """Breaks: an answer can only go on until its limit cuts it off."""
    if ends:
        compiler.start(Grammar.json_schema(schema))
    else:
        with pytest.raises(GrammarError, match=r"never ends: each '#/\$defs/n' needs another one"):
            compiler.start(Grammar.json_schema(schema))


@pytest.mark.parametrize("source", ["start: A\nA: /a/ & ~/a/", 'start: "a'])
def test_an_engines_state_is_in_no_message(compiler: GrammarCompiler, source: str) -> None:
    """Breaks: a client reads the parser's inner state in place of a reason."""
    with pytest.raises(GrammarError) as raised:
        compiler.start(Grammar.lark(source)).allowed([])
    assert "<state>" not in str(raised.value) and "NoExtensionBias" not in str(raised.value)
