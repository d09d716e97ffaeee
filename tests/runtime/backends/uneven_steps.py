"""Steps whose sequences have different numbers of tokens, behind caches of different lengths."""

import numpy as np
from tide_runtime import Engine


def uneven_logits(engine: Engine) -> np.ndarray:
    """Logits [6, V] of three steps."""
    context, logits = engine.backend.context(3), []
    steps = (([0, 0, 0], [5, 2, 3], []), ([5, 2, 3], [1, 4, 2], [1, 3, 0]), ([6, 6, 4], [1, 1, 1], [1, 1, 1]))
    for lengths, counts, wanted in steps:
        step = context.step(0, counts, wanted)
        step.input_ids[: sum(counts)] = np.arange(sum(counts)) + 11
        step.place(lengths)
        for segment in engine.manifest.segments:
            step.run(segment.name)
        logits.append(np.array(step.logits[: sum(wanted)]))
    return np.concatenate(logits)
