"""Static layer skip: every token is the prediction of the model's own head after the same few layers."""

from __future__ import annotations

from tide_runtime.bundle.manifest import Manifest

from tide_bench.arms.base import Timing
from tide_bench.arms.tide import TideArm
from tide_bench.stub_exits import with_exits


class StaticSkipArm(TideArm):
    """A bundle with one cut: policy ``exit`` with an exit there that is always sure."""

    def generate(self, prompts: list[list[int]], new_tokens: int, policy: str = "exit", threshold: float | None = None) -> Timing:
        return super().generate(prompts, new_tokens, policy, threshold)

    def _manifest(self) -> Manifest:
        manifest = super()._manifest()
        return with_exits(manifest, manifest.checkpoints, costs=None)
