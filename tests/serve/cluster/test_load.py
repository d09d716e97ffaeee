"""Options of a deployment."""

import re

import pytest
from tide_runtime import DepthOptions, ThreadOptions
from tide_runtime.errors import ParamsError
from tide_serve.cluster.replica import ReplicaConfig, server_config


def test_options_reach_the_engine():
    """Breaks: an option of the configuration file is read and forgotten."""
    engine = {"policy": "exact", "max_batch": 3, "depth": {"draft": "ngram"}}
    options = ReplicaConfig.of({"bundle": "/models/engine", "engine": engine, "threads": 2}).options()
    assert (options.policy, options.max_batch, options.depth) == ("exact", 3, DepthOptions(draft="ngram"))
    assert options.threads == ThreadOptions(2, shared=True)


def test_options_reach_the_server():
    """Breaks: a list of the configuration file is not the tuple that the options compare with."""
    config = server_config({"model_names": ["a", "b"], "max_tokens": 5})
    assert (config.model_names, config.max_tokens) == (("a", "b"), 5)


@pytest.mark.parametrize(
    ("user_config", "message"),
    [({}, "no bundle"), ({"bundle": "x", "threds": 1}, "user_config has no option threds")],
)
def test_wrong_user_config(user_config, message):
    """Breaks: an update with a typing error serves something else than was asked for."""
    with pytest.raises(ParamsError, match=re.escape(message)):
        ReplicaConfig.of(user_config)


@pytest.mark.parametrize(
    ("name", "value"), [("api_keys", ["secret"]), ("tls_key", "key.pem"), ("tls_certificate", "cert.pem"), ("write_timeout", 1)]
)
def test_options_that_a_cluster_does_not_use(name, value):
    """Breaks: keys that Ray's dashboard shows, or a limit that is set and does not hold."""
    with pytest.raises(ParamsError, match=f"server.{name} cannot be set here"):
        server_config({name: value})
