"""Who takes part: TIDE's policies and the other ways to run the same model, and what each promises about its text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Promise = Literal["same", "certified", "none"]


@dataclass(frozen=True)
class Contestant:
    """One arm of the comparison.

    Args:
        name: on the command line and in result names.
        title: what people see.
        kind: of process it lives in, a name of `tide_bench.arms.ARMS`; contestants of one kind share it.
        promise: ``same``: the model's own greedy tokens; ``certified``: as often as the bundle's certificate says; ``none``.
        options: what its kind's ``generate`` takes besides.
        layers: True when every token takes all layers.
    """

    name: str
    title: str
    kind: str
    promise: Promise
    options: dict[str, Any] = field(default_factory=dict)
    all_layers: bool = False


POLICIES: dict[str, Contestant] = {
    "full": Contestant("full", "TIDE full", "tide", "same", {"policy": "full"}),
    "exact": Contestant("exact", "TIDE exact", "tide", "same", {"policy": "exact"}),
    "exit": Contestant("exit", "TIDE exit", "tide", "certified", {"policy": "exit"}),
}
RIVALS: dict[str, Contestant] = {
    "unsplit": Contestant("unsplit", "unsplit ONNX graph", "unsplit", "same"),
    "eager": Contestant("eager", "HF eager", "eager", "same", all_layers=True),
    "compile": Contestant("compile", "HF torch.compile", "compile", "same", all_layers=True),
    "genai": Contestant("genai", "onnxruntime-genai", "genai", "same", all_layers=True),
    "assisted": Contestant("assisted", "HF assistant_early_exit", "eager", "same"),
    # HF's documentation, "Prompt lookup decoding"
    "prompt-lookup": Contestant("prompt-lookup", "HF prompt lookup", "eager", "same", {"prompt_lookup_num_tokens": 10}),
    "predecessor": Contestant("predecessor", "tide-inference", "predecessor", "none", all_layers=True),
    "static-skip": Contestant("static-skip", "static layer skip", "static", "none"),
}
