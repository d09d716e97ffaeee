"""What the GPU decode benchmark runs: these arms, on these models, for so many sequences at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import typer

from benchmarks.gpu.model_shapes import SHAPES, ModelShape

# The baseline of tokens first.
ARMS = {
    "eager": "HF eager",
    "unsplit": "unsplit ONNX graph",
    "tide": "TIDE full",
    "exact": "TIDE exact",
    "compile": "HF torch.compile",
}
MODELS, BATCHES = "demo,1b", "1,8"  # by default: all shapes at batch 32 too would take 110 GB of disk for their bundles


@dataclass(frozen=True)
class DecodeCase:
    """``dtype``: of the weights; int4 computes in fp16."""

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

    @property
    def arms(self) -> list[str]:
        """Of `ARMS`. fp32 is there for its tokens, and torch computes int4 weights in fp16: neither is worth compiling."""
        return [arm for arm in ARMS if arm != "compile" or self.dtype not in ("fp32", "int4")]


def decode_cases(models: str = MODELS, batches: str = BATCHES) -> Iterator[DecodeCase]:
    """Every dtype of ``models``, for all ``batches``, both comma-separated. Raises typer.BadParameter for an unknown model."""
    for name in models.split(","):
        if name not in SHAPES:
            raise typer.BadParameter(f"there is no model {name!r}; choose from: {', '.join(SHAPES)}")
        for dtype in SHAPES[name].dtypes:
            for rows in batches.split(","):
                yield DecodeCase(SHAPES[name], dtype, int(rows))
