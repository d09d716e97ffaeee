"""The variants of the demo model: how a step trains for early exit."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """What a variant's loss adds to that of the last layer; all zero for a stock model.

    Args:
        dropout, exit_weight: of LayerSkip, see `layer_skip`.
        loop_weight: of the mean loss of the loops before the last one, see `looped`; more than 0 for a looped model only.
        distillation: share, in these loops' targets, of the last loop's distribution; the rest is the text's token.
    """

    name: str
    dropout: float = 0.0
    exit_weight: float = 0.0
    loop_weight: float = 0.0
    distillation: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1 or self.exit_weight < 0:
            raise ValueError(f"variant {self.name}: dropout must be in [0, 1), exit_weight at least 0")
        if not 0 <= self.distillation <= 1 or self.loop_weight < 0:
            raise ValueError(f"variant {self.name}: distillation must be in [0, 1], loop_weight at least 0")


VARIANTS = {
    "stock": Variant("stock"),
    "layerskip": Variant("layerskip", dropout=0.1, exit_weight=0.25),
    "looped": Variant("looped", loop_weight=1.0, distillation=0.5),
}
