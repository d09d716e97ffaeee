"""Old place of `DepthOptions`; remove in the next release."""

import warnings

from tide_runtime.depth.options import DepthOptions

warnings.warn(
    "import DepthOptions from tide_runtime; tide_runtime.policies goes with the next release", DeprecationWarning, stacklevel=2
)

__all__ = ["DepthOptions"]
