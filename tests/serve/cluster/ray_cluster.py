"""A Ray cluster of several nodes on this machine, for tests of the server on it."""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest.mock import patch

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ReplicaState, ServeDeploySchema
from tide_serve.ray import MODEL

T = TypeVar("T")
_LOOPBACK = "127.0.0.2"  # Ray replaces 127.0.0.1 by the machine's own address
_OBJECT_STORE = 80 * 2**20  # bytes for each node
_APPLICATION = "tide"
_PATIENCE_S = 180


@contextmanager
def local_cluster(nodes: int, environment: Mapping[str, str]) -> Iterator[str]:
    """A head without cores and ``nodes`` with one core each, which are used by replicas; nothing leaves the machine.

    Yields host and port at which applications will answer. This process is connected to the cluster.

    Args:
        environment: of all of the cluster's processes, besides this one's.
    """
    # No token: Ray would keep one in the home directory. Only this machine can connect.
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", **environment}
    # A short path: the folder holds sockets, whose names are limited. `temp_dir` would leave the file with the cluster's address
    # where Ray keeps those of this user's other clusters, and that folder does not exist before the first one.
    with (
        TemporaryDirectory(prefix="tide-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        patch.dict(os.environ, {**variables, "RAY_TMPDIR": folder}),
    ):
        node: dict[str, Any] = {"node_ip_address": _LOOPBACK, "object_store_memory": _OBJECT_STORE, "include_log_monitor": False}
        cluster = Cluster()
        try:
            cluster.add_node(**node, num_cpus=0, include_dashboard=False)
            for _ in range(nodes):
                cluster.add_node(**node, num_cpus=1)
            ray.init(address=cluster.address, log_to_driver=False)
            address = f"127.0.0.1:{_free_port()}"
            host, _, port = address.partition(":")
            serve.start(http_options={"host": host, "port": int(port)}, proxy_location="HeadOnly")
            yield address
            serve.shutdown()
        finally:
            ray.shutdown()
            cluster.shutdown()


@dataclass
class Deployment:
    """The application as it is, or is to be, deployed.

    Args:
        import_path: of its builder.
        args: of the builder.
        overrides: options of the deployment of the replicas, such as ``num_replicas`` and ``user_config``.
    """

    import_path: str
    args: dict[str, Any]
    overrides: dict[str, Any] = field(default_factory=dict)

    def deploy(self) -> None:
        """As ``serve deploy`` does; returns when the controller has it, and may take long to be done."""
        application: dict[str, Any] = {"name": _APPLICATION, "import_path": self.import_path, "args": self.args}
        if self.overrides:
            application["deployments"] = [{"name": MODEL, **self.overrides}]
        controller = _get_global_client()
        assert controller is not None  # it raises otherwise
        controller.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))

    def finish(self, replicas: int) -> None:
        """`deploy`, and wait until ``replicas`` run. Raises RuntimeError where they do not."""
        self.deploy()
        in_time(lambda: running_replicas() == replicas)


def running_replicas() -> int:
    """Replicas that take requests, as long as nothing else is being started or stopped; otherwise 0. Raises RuntimeError
    where the deployment has failed."""
    status = serve.status().applications[_APPLICATION]
    if status.status == ApplicationStatus.DEPLOY_FAILED:
        raise RuntimeError(f"the deployment has failed: {status.message}")
    if status.status != ApplicationStatus.RUNNING:
        return 0
    states = status.deployments[MODEL].replica_states
    return states[ReplicaState.RUNNING] if set(states) == {ReplicaState.RUNNING} else 0


def in_time(wanted: Callable[[], T], seconds: float = _PATIENCE_S) -> T:
    """The first true value of ``wanted``, which is called until then. Raises RuntimeError when ``seconds`` are over."""
    end = time.monotonic() + seconds
    while not (value := wanted()):
        if time.monotonic() > end:
            raise RuntimeError(f"what was waited for has not happened within {seconds:g} s")
        time.sleep(0.05)
    return value


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
