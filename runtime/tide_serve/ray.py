"""The server as a Ray Serve application: an ingress without a model, and replicas of the model on any machine of the cluster.

    serve run tide_serve.ray:app bundle=/models/engine replicas=3
    serve deploy serve.yaml        # deploy/serve.yaml is an example

Each replica is a process with an engine of its own; replicas on one machine map the same packed weights.
"""

# No `from __future__ import annotations`: Ray needs the builder's annotation as a class.

import os
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from tide_runtime import EngineOptions
from tide_runtime.errors import ParamsError

from tide_serve.cluster.affinity import PrefixAffinityRouter
from tide_serve.cluster.ingress import ingress_builder
from tide_serve.cluster.replica import LoadApp, Model, ReplicaConfig, load_app, server_config

__all__ = ["ServingArgs", "app", "application", "build_app"]

MODEL, INGRESS = "Model", "Ingress"  # the deployments' names in a configuration file
_ROUTER = f"{PrefixAffinityRouter.__module__}:{PrefixAffinityRouter.__name__}"


class ServingArgs(BaseModel):
    """Arguments of the application: ``args`` in a configuration file, ``name=value`` on the command line of ``serve run``.

    Args:
        bundle: a directory that every machine has; without it, the environment variable TIDE_BUNDLE.
        replicas: engines; the fewest, where ``max_replicas`` is given.
        max_replicas: Ray starts up to so many while more requests are in progress than the replicas run at once.
        cpus: cores of a replica, and its engine's threads.
        gpus: number of GPUs of a replica.
        ingresses: processes that check and forward requests. A key's limits hold in each of them.
        api_key_file: a file with a key on each line, on the machines of the ingresses; also: their variable TIDE_API_KEYS.
        otel: the replicas send traces to OTEL_EXPORTER_OTLP_ENDPOINT (needs the extra tracing).
        engine: fields of `EngineOptions`, such as ``{"policy": "exact", "max_batch": 8}``.
        server: fields of `ServeConfig`.
    """

    model_config = ConfigDict(extra="forbid")

    bundle: str = Field(default_factory=lambda: os.environ.get("TIDE_BUNDLE", ""))
    replicas: int = Field(default=1, ge=1)
    max_replicas: int | None = Field(default=None, ge=1)
    cpus: int = Field(default=1, ge=1)
    gpus: float = Field(default=0, ge=0)
    ingresses: int = Field(default=1, ge=1)
    api_key_file: Path | None = None
    otel: bool = False
    engine: dict[str, Any] = {}
    server: dict[str, Any] = {}


def build_app(args: ServingArgs) -> Application:
    """The application for ``args``; nothing is loaded yet. Raises ParamsError for options that are wrong or missing."""
    return application(args, partial(load_app, server_config(args.server), args.otel))


app = build_app  # what `serve run tide_serve.ray:app` calls


def application(args: ServingArgs, load: LoadApp) -> Application:
    """The same with an application of your own in the replicas, which ``load`` makes there. Raises ParamsError."""
    if not args.bundle:
        raise ParamsError("no bundle is given; add bundle=DIRECTORY, or set the environment variable TIDE_BUNDLE")
    user_config = {"bundle": args.bundle, "engine": args.engine, "threads": args.cpus}
    options = ReplicaConfig.of(user_config).options()
    config = server_config(args.server)
    model = serve.deployment(
        name=MODEL,
        user_config=user_config,
        # More than run at once, so that the engine has the next ones at hand; further ones wait where any replica can take them.
        max_ongoing_requests=2 * options.max_batch,
        max_queued_requests=options.max_queue,
        request_router_config={"request_router_class": _ROUTER},
        graceful_shutdown_timeout_s=config.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        **_scale(args, options),
    )(Model)
    ingress = serve.deployment(
        name=INGRESS,
        num_replicas=args.ingresses,
        max_ongoing_requests=4096,  # it only waits for the replicas; the checks and the model's queue bound what is accepted
        graceful_shutdown_timeout_s=config.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress(ingress_builder(MODEL, config, args.api_key_file))())
    return ingress.bind(model.bind(load))


def _scale(args: ServingArgs, options: EngineOptions) -> dict[str, Any]:
    if args.max_replicas is None:
        return {"num_replicas": args.replicas}
    if args.max_replicas < args.replicas:
        raise ParamsError(f"max_replicas is {args.max_replicas}; set it to at least the {args.replicas} of replicas")
    # Ray adds replicas while there is more to do than they run at once.
    autoscaling = {
        "min_replicas": args.replicas,
        "max_replicas": args.max_replicas,
        "target_ongoing_requests": options.max_batch,
    }
    return {"autoscaling_config": autoscaling}
