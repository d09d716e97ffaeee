"""An HTTP server for bundles that clients of OpenAI's API use unchanged."""

from tide_serve.app import make_app
from tide_serve.config import ServeConfig

__all__ = ["ServeConfig", "make_app"]
