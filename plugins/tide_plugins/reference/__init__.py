"""NumPy references of the kernels in float64, one file per kernel, for tests on the host and on a GPU."""

from tide_plugins.reference.draft_verify import Verification, VerifyState, draft_verify
from tide_plugins.reference.exit_router import Routing, exit_router
from tide_plugins.reference.exit_select import Selection, exit_select
from tide_plugins.reference.exit_translate import exit_translate
from tide_plugins.reference.philox import philox_4x32_10, uniform_at

__all__ = [
    "Routing",
    "Selection",
    "Verification",
    "VerifyState",
    "draft_verify",
    "exit_router",
    "exit_select",
    "exit_translate",
    "philox_4x32_10",
    "uniform_at",
]
