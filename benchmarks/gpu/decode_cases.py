"""What the GPU decode benchmark runs: these arms, on these models, for so many sequences at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import typer

from benchmarks.gpu.model_shapes import SHAPES, ModelShape

ARMS = {"eager": "HF eager", "compile": "HF torch.compile", "unsplit": "unsplit ONNX graph", "tide": "TIDE full"}
MODELS, BATCHES = ",".join(SHAPES), "1,8,32"


@dataclass(frozen=True)
class DecodeCase:
    shape: ModelShape
    dtype: str
    rows: int

    @property
    def name(self) -> str:
        return f"{self.shape.name}_{self.dtype}_b{self.rows}"

    @property
    def key(self) -> dict[str, str | int]:
        """The key of the case in a row of the report."""
        return {"model": self.shape.name, "dtype": self.dtype, "batch": self.rows}


def decode_cases(models: str = MODELS, batches: str = BATCHES) -> Iterator[DecodeCase]:
    """Every dtype of ``models``, for all ``batches``, both comma-separated. Raises typer.BadParameter for an unknown model."""
    for name in models.split(","):
        if name not in SHAPES:
            raise typer.BadParameter(f"there is no model {name!r}; choose from: {', '.join(SHAPES)}")
        for dtype in SHAPES[name].dtypes:
            for rows in batches.split(","):
                yield DecodeCase(SHAPES[name], dtype, int(rows))
