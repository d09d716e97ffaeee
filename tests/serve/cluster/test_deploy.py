"""The files in deploy/: what they promise, and that Ray takes them."""

import configparser
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from ray.serve.schema import ServeDeploySchema
from tide_runtime.errors import ParamsError
from tide_serve.cli import app as tide_serve
from tide_serve.ray import INGRESS, MODEL, ServingArgs, app, build_app

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"


def _serve_config() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "serve.yaml").read_text())


def _ray_service() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "kuberay" / "rayservice.yaml").read_text())


def _embedded_config() -> dict[str, Any]:
    return yaml.safe_load(_ray_service()["spec"]["serveConfigV2"])


CONFIGS = {"serve.yaml": _serve_config, "rayservice.yaml": _embedded_config}


@pytest.mark.parametrize("name", CONFIGS)
def test_ray_takes_the_configuration(name):
    """Breaks: `serve deploy` refuses the example that users begin with."""
    config = CONFIGS[name]()
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "tide_serve.ray:app" and app is build_app
    built = build_app(ServingArgs.model_validate(application.args))
    assert built._bound_deployment.name == INGRESS and built._bound_deployment.init_args[0]._bound_deployment.name == MODEL


def test_commented_update_is_complete():
    """Breaks: the update without a restart that serve.yaml describes loads other options than those above it."""
    text = (DEPLOY / "serve.yaml").read_text()
    commented = re.sub(r"^    # ?", "    ", text[text.index("    # deployments:") :], flags=re.MULTILINE)
    (application,) = ServeDeploySchema.model_validate(
        yaml.safe_load(text[: text.index("    # deployments:")] + commented)
    ).applications
    (deployment,) = application.deployments
    model = build_app(ServingArgs.model_validate(application.args))._bound_deployment.init_args[0]._bound_deployment
    assert deployment.name == MODEL
    assert {**deployment.user_config, "bundle": application.args["bundle"]} == model._deployment_config.user_config


def test_arguments_of_the_command_line():
    """Breaks: `serve run tide_serve.ray:app bundle=… replicas=3` fails on its values, which are all strings."""
    args = ServingArgs.model_validate({"bundle": "/models/engine", "replicas": "3"})
    model = build_app(args)._bound_deployment.init_args[0]._bound_deployment
    assert model.num_replicas == 3


def test_autoscaling_by_queue_length():
    """Breaks: replicas are added while the others still have room, or never."""
    args = ServingArgs(bundle="/models/engine", replicas=2, max_replicas=5, engine={"max_batch": 8})
    model = build_app(args)._bound_deployment.init_args[0]._bound_deployment
    scale = model._deployment_config.autoscaling_config
    assert (scale.min_replicas, scale.max_replicas, scale.target_ongoing_requests) == (2, 5, 8)
    assert model._deployment_config.max_ongoing_requests > 8


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "bundle=DIRECTORY"),
        ({"engine": {"polcy": "exact"}, "bundle": "x"}, "engine has no option polcy"),
        ({"engine": {"depth": {"x": 1}}, "bundle": "x"}, "engine.depth has no option x"),
        ({"engine": {"max_batch": 0}, "bundle": "x"}, "max_batch is 0"),
        ({"server": {"max_tokens": 0}, "bundle": "x"}, "max_tokens is 0"),
        ({"replicas": 3, "max_replicas": 2, "bundle": "x"}, "max_replicas is 2"),
    ],
)
def test_wrong_options(args, message, monkeypatch):
    """Breaks: a typing error is found when the first replica starts on another machine, or never."""
    monkeypatch.delenv("TIDE_BUNDLE", raising=False)
    with pytest.raises(ParamsError, match=re.escape(message)):
        build_app(ServingArgs(**args))


def _instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Containerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def test_image_is_built_from_what_is_there():
    """Breaks: the build fails on a folder that was moved, or the builder is not sent one."""
    copied = [argument.split()[:-1] for name, argument in _instructions() if name == "COPY" and not argument.startswith("--from")]
    sources = [source for each in copied for source in each]
    sent = re.findall(r"^!(.+)$", (DEPLOY / "Containerfile.dockerignore").read_text(), flags=re.MULTILINE)
    assert sources and all((ROOT / source).exists() for source in sources)
    assert sorted(sources) == sorted(sent)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {package.split("/")[0] for package in packages} <= set(sources)
    assert dict(_instructions())["ENTRYPOINT"] == '["tide-serve"]' and "tide-serve" in project["project"]["scripts"]


def _unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "systemd" / name).read_text(encoding="utf-8"))
    return parser


def test_units_of_systemd_keep_the_port_and_let_answers_finish():
    """Breaks: systemd kills a server in the middle of its answers, or starts it without its socket."""
    service, sockets = _unit("tide-serve.service"), _unit("tide-serve.socket")
    assert "tide-serve.socket" in service["Unit"]["Requires"].split() and "tide-serve.socket" in service["Unit"]["After"].split()
    assert "," not in sockets["Socket"]["ListenStream"] and sockets["Socket"].get("Accept", "no") == "no"
    command, *arguments = shlex.split(service["Service"]["ExecStart"])
    parsed = typer.main.get_command(tide_serve).make_context(Path(command).name, arguments).params
    assert float(service["Service"]["TimeoutStopSec"]) > parsed["drain_timeout"]


def _pods() -> dict[str, dict[str, Any]]:
    cluster = _ray_service()["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return {group.get("groupName", "head"): group["template"]["spec"] for group in groups}


@pytest.mark.parametrize("pod", _pods().values(), ids=_pods().keys())
def test_pods_are_locked_down(pod):
    """Breaks: a pod that a cluster with the restricted policy refuses, or one that can write to more than its own folders."""
    (container,) = pod["containers"]
    user = pod["securityContext"]
    assert user["runAsNonRoot"] and f"{user['runAsUser']}:{user['runAsGroup']}" == dict(_instructions())["USER"]
    assert container["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/tmp", "/dev/shm"}
    assert {"livenessProbe", "readinessProbe"} <= container.keys()
