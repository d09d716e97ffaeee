"""The application of `tide_serve.ray` whose replicas note the memory of all replicas before they load an engine."""

# No `from __future__ import annotations`: Ray needs the builder's annotation as a class.

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from fastapi import FastAPI
from ray.serve import Application
from tide_runtime import Engine, GenerationParams
from tide_serve.cluster.replica import load_app, server_config
from tide_serve.config import ServeConfig
from tide_serve.ray import ServingArgs, application

from benchmarks.serving.ray_cluster import replica_processes

FOLDER = "TIDE_BENCH_FOLDER"  # environment variable: where the notes are left


def app(args: ServingArgs) -> Application:
    return application(args, partial(load_measured, server_config(args.server)))


def load_measured(config: ServeConfig, user_config: Mapping[str, Any]) -> tuple[Engine, FastAPI]:
    before = replicas_memory()
    engine, app = load_app(config, False, user_config)
    engine.generate([[1] * 16], GenerationParams(max_new_tokens=8, ignore_eos=True))  # makes what the first request makes
    Path(os.environ[FOLDER], f"{os.getpid()}.json").write_text(json.dumps(asdict(before)), encoding="utf-8")
    return engine, app


@dataclass(frozen=True)
class Memory:
    """Proportional set size in MiB, which counts a page once however many processes map it.

    Args:
        files: the part of it that maps files: weights and libraries.
    """

    total: float
    files: float

    def __sub__(self, other: "Memory") -> "Memory":
        return Memory(self.total - other.total, self.files - other.files)


def memory_before(folder: Path, replica: psutil.Process) -> Memory:
    """That of all replicas just before ``replica`` loaded its engine, its own process without the engine included."""
    return Memory(**json.loads((folder / f"{replica.pid}.json").read_text(encoding="utf-8")))


def replicas_memory() -> Memory:
    """That of all replicas together."""
    rollups = [Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8") for process in replica_processes()]
    lines = [line.split() for rollup in rollups for line in rollup.splitlines()]
    return Memory(*(sum(int(line[1]) for line in lines if line[0] == kind) / 1024 for kind in ("Pss:", "Pss_File:")))
