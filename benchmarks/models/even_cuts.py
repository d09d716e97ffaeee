"""One model cut into even segments, several ways from one trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tide_bench.cuts import write_cuts

from tide_export.load import LoadedModel


def write_even_cuts(loaded: LoadedModel, directory: Path, segment_counts: Sequence[int], max_seq_len: int) -> None:
    """A bundle ``directory``/segments_N of N even segments for each count, in fp32."""
    layers = loaded.model.config.get_text_config().num_hidden_layers
    places = {n: [str(round(i * layers / n)) for i in range(1, n)] for n in segment_counts}
    cuts = {directory / f"segments_{n}": ",".join(places[n]) or "none" for n in segment_counts}
    write_cuts(loaded, cuts, "fp32", max_seq_len)
