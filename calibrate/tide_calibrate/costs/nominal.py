"""Nominal step costs, used to choose exits when costs were not measured.

Decoding is bound by the bandwidth of reading weights, so a layer and the head cost in proportion to their parameters; further
tokens in the same launch cost little (assumed here: four tokens take 1.24x as long as one).
"""

from __future__ import annotations

from tide_runtime.bundle.calibration import CostTable, StepCost
from transformers import PreTrainedModel

from tide_calibrate.costs.fit import ROUTER_WIDTH
from tide_export.trace import decoder_layers

TARGET = "nominal"
_EXTRA_TOKEN = 0.08  # additional time per further token in a launch, as a share of one token's time
_SIZES = (1, 2, 4, 8, 16)


def nominal_costs(model: PreTrainedModel) -> CostTable:
    """Costs in units of one layer for one token, in the table's ms fields; launches and host overhead are 0."""
    layers = decoder_layers(model)
    one_layer = sum(parameter.numel() for parameter in layers[0].parameters())
    embeddings = model.get_output_embeddings()
    head = sum(parameter.numel() for parameter in embeddings.parameters()) / one_layer if embeddings is not None else 1.0
    exit_graph = 3 * ROUTER_WIDTH * model.config.get_text_config().hidden_size / one_layer  # a router and a translator
    steps = [StepCost(1, size, 0.0, _relative_cost(size), head * _relative_cost(size), exit_graph, 0.0) for size in _SIZES]
    return CostTable(TARGET, "none", len(layers) + head, steps)


def _relative_cost(tokens: int) -> float:
    return 1 + _EXTRA_TOKEN * (tokens - 1)
