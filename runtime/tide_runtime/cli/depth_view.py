"""A generated text coloured by depth: the number of layers run for each token."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from rich.text import Text

from tide_runtime.outputs import Generation
from tide_runtime.text.tokenizer import TextStream, Tokenizer

# Cool to warm with depth; distinguishable with colour blindness (Wong 2011, Nature Methods 8, 441).
_BANDS = ("#56b4e9", "#009e73", "#f0e442", "#e69f00", "#d55e00")


def colour(depth: int, num_layers: int) -> str:
    """The colour of ``depth`` layers of ``num_layers``."""
    return _BANDS[min(len(_BANDS) - 1, depth * len(_BANDS) // max(1, num_layers))]


def terminal_view(generation: Generation, tokenizer: Tokenizer | None, num_layers: int) -> Text:
    """The text with coloured tokens, and a legend, for a terminal."""
    view = Text()
    for piece, depth in _pieces(generation, tokenizer, num_layers):
        view.append(piece, style=colour(depth, num_layers))
    view.append("\n")
    for depth, count in generation.stats.depths(num_layers).items():
        view.append(f" {depth} layers: {count} ", style=f"black on {colour(depth, num_layers)}")
    return view


def html_view(generation: Generation, tokenizer: Tokenizer | None, num_layers: int) -> str:
    """The text with coloured tokens, and a legend, as a self-contained HTML page."""
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
        f"<h1>Layers run before each token was final</h1><p>{legend}</p><pre>{tokens}</pre></html>\n"
    )


def _pieces(generation: Generation, tokenizer: Tokenizer | None, num_layers: int) -> Iterator[tuple[str, int]]:
    """Text and depth of each token, up to the end of the text."""
    stats = generation.stats
    stream = TextStream(tokenizer, ()) if tokenizer is not None else None
    depth = num_layers
    left = len(generation.text or "")  # a stop string or eos token after the text is not shown
    for token, depth in zip(generation.token_ids, stats.depth_of_each(num_layers), strict=True):
        piece = stream.push(token)[:left] if stream is not None else f"{token} "
        left -= len(piece)
        yield piece, depth
    if stream is not None:
        yield stream.flush()[: max(0, left)], depth
