"""A generated text coloured by depth: how many layers were run before each token was said."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from rich.text import Text

from tide_runtime.outputs import Generation
from tide_runtime.text.tokenizer import TextStream, Tokenizer

# Shallow is cool, deep is warm; the colours stay apart for colour-blind readers (Wong 2011, Nature Methods 8, 441).
_BANDS = ("#56b4e9", "#009e73", "#f0e442", "#e69f00", "#d55e00")


def colour(depth: int, num_layers: int) -> str:
    """The colour of ``depth`` layers of ``num_layers``."""
    return _BANDS[min(len(_BANDS) - 1, depth * len(_BANDS) // max(1, num_layers))]


def terminal_view(generation: Generation, tokenizer: Tokenizer | None, num_layers: int) -> Text:
    """The text with its tokens in colour, and a legend below."""
    view = Text()
    for piece, depth in _pieces(generation, tokenizer, num_layers):
        view.append(piece, style=colour(depth, num_layers))
    view.append("\n")
    for depth, count in generation.stats.depths(num_layers).items():
        view.append(f" {depth} layers: {count} ", style=f"black on {colour(depth, num_layers)}")
    return view


def html_view(generation: Generation, tokenizer: Tokenizer | None, num_layers: int) -> str:
    """The same as one self-contained page."""
    tokens = "".join(
        f'<span style="background:{colour(depth, num_layers)}" title="{depth} of {num_layers} layers">{escape(piece)}</span>'
        for piece, depth in _pieces(generation, tokenizer, num_layers)
    )
    legend = " ".join(
        f'<span style="background:{colour(depth, num_layers)}">{depth} layers: {count} tokens</span>'
        for depth, count in generation.stats.depths(num_layers).items()
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Depth per token</title>'
        "<style>body{font:16px/1.6 monospace;margin:2em;max-width:100ch}pre{white-space:pre-wrap}</style>"
        f"<h1>Layers run before each token was said</h1><p>{legend}</p><pre>{tokens}</pre></html>\n"
    )


def _pieces(generation: Generation, tokenizer: Tokenizer | None, num_layers: int) -> Iterator[tuple[str, int]]:
    """The text of each token and its depth, up to where the text ends; the first comes from the prompt's pass through all layers.

    A policy that takes all layers for every token notes no depths.
    """
    stats, stream, depth = generation.stats, TextStream(tokenizer, ()) if tokenizer is not None else None, num_layers
    left = len(generation.text or "")  # what ended the text, a stop string or the end's own token, is not shown
    for token, depth in zip(generation.token_ids, stats.depth_of_each(num_layers), strict=True):
        piece = stream.push(token)[:left] if stream is not None else f"{token} "
        left -= len(piece)
        yield piece, depth
    if stream is not None:
        yield stream.flush()[: max(0, left)], depth
