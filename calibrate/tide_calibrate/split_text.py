"""Calibration text ready to be captured: documents in their splits, cut into windows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tide_runtime.errors import DataError

from tide_calibrate.calibration_file import DataInfo
from tide_calibrate.config import CalibrationConfig
from tide_calibrate.data import SPLITS, Document, Note, Windows, digest, load_documents, split_documents, windows
from tide_export.load import LoadedModel


@dataclass(frozen=True)
class SplitText:
    """``split``: [documents] int8, index into ("train", "threshold", "test")."""

    documents: list[Document]
    split: NDArray[np.int8]
    windows: Windows

    def info(self, source: str, seed: int) -> DataInfo:
        """Counts and hashes of each split, for calibration.json."""
        per_window = self.split[self.windows.document]
        parts = {name: np.flatnonzero(self.split == i) for i, name in enumerate(SPLITS)}
        return DataInfo(
            source,
            seed,
            documents={name: len(part) for name, part in parts.items()},
            tokens={name: int(self.windows.lengths[per_window == i].sum()) for i, name in enumerate(SPLITS)},
            sha256={name: digest([self.documents[d] for d in part]) for name, part in parts.items()},
        )


def read_text(source: str, loaded: LoadedModel, config: CalibrationConfig, note: Note) -> SplitText:
    """Read, split and cut the text in ``source``. Raises DataError when it is missing, unreadable or too little."""
    documents = load_documents(source, note)
    if loaded.tokenizer is None:
        raise DataError(f"{loaded.source} has no fast tokenizer (tokenizer.json), so text cannot be cut into its tokens; add one")
    split = split_documents(documents, config.seed)
    cut = windows(documents, split, loaded.tokenizer, config.window, config.max_windows, config.seed)
    return SplitText(documents, split, cut)
