"""The quality of exit heads and routers on held-out files: agreement by depth, and how well each router orders tokens.

Files are split by document: heads and routers learn from some, every figure comes from others (split ``test``). The models have
seen none of them either. ``--data library`` is this installation's held-out files, some 500: of the demo's own 23, heads learn
the authors' style, and six documents more or less change the order of the heads on three others.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from tide_bench.report import Report
from tide_calibrate.capture.capture import capture
from tide_calibrate.capture.store import Capture
from tide_calibrate.exit_heads import ExitHead, make_head, parse_kind
from tide_calibrate.exit_heads.train import HeadTraining, train_head
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.routers import TRAINING_FREE, Router
from tide_calibrate.routers.train import RouterTraining, train_router
from tide_calibrate.text.documents import split_documents, windows
from tide_calibrate.traces.record import trace_split
from tide_calibrate.traces.trace import ExitTrace, SplitTrace

from benchmarks.exits.exit_traces import held_out_documents
from benchmarks.models.model_folders import DEMO_MODELS
from tide_export.load import LoadedModel, load_model

HEADS = "identity,linear,tail:1,tail:2,block:1"
CHECKPOINTS = "4,6,8,10,12,14,16,18,20"
ROUTERS = {"mlp": "MLP", "cosine": "MLP, cosine label"}
Exit = tuple[int, str]


@dataclass(frozen=True)
class Plan:
    """What is measured of each model on ``data``: exit heads ``kinds`` after ``places`` layers, routers for one kind."""

    data: str
    kinds: Sequence[str]
    places: Sequence[int]
    router_head: str
    windows: int
    steps: int


def capture_model(loaded: LoadedModel, plan: Plan, directory: Path) -> Capture:
    """Capture the held-out files; a capture already in ``directory`` is used again."""
    layers = loaded.model.config.num_hidden_layers
    tails = {layers - k for name, k in map(parse_kind, plan.kinds) if name == "tail"}
    documents = held_out_documents(plan.data)
    split = split_documents(documents)
    assert loaded.tokenizer is not None
    text = windows(documents, split, loaded.tokenizer, limit=plan.windows)
    return capture(loaded, text, split, sorted({*plan.places, *tails, layers}), directory)


def train_heads(model: FrozenModel, captured: Capture, plan: Plan) -> tuple[dict[Exit, ExitHead], dict[str, float]]:
    """All heads, and the mean seconds that training one of each kind took."""
    heads, seconds = {}, dict[str, float]()
    for kind in plan.kinds:
        begin = time.perf_counter()
        for checkpoint in plan.places:
            head = make_head(kind, model, checkpoint)
            heads[checkpoint, kind], _ = train_head(head, captured, HeadTraining(steps=plan.steps))
        seconds[kind] = (time.perf_counter() - begin) / len(plan.places)
    return heads, seconds


def train_routers(head: ExitHead, captured: Capture) -> list[Router]:
    """Every kind of router for one exit."""
    mlp = train_router(head, captured)
    cosine = train_router(head, captured, RouterTraining(label="cosine"))
    cosine.kind = "cosine"
    return [mlp, *TRAINING_FREE, cosine]


def main(
    models: Annotated[str, typer.Option(help="Comma-separated: layerskip, stock.")] = "layerskip,stock",
    data: Annotated[str, typer.Option(help="library, demo, or a path: held-out text.")] = "library",
    limit: Annotated[int, typer.Option("--windows", help="Windows of 256 tokens captured, at most.")] = 2000,
    heads: Annotated[str, typer.Option(help="Exit heads to train, comma-separated.")] = HEADS,
    checkpoints: Annotated[str, typer.Option(help="Layers to exit after, comma-separated.")] = CHECKPOINTS,
    router_head: Annotated[str, typer.Option(help="The exit head that routers judge.")] = "tail:1",
    steps: Annotated[int, typer.Option(help="Training steps of a head, at most.")] = HeadTraining().steps,
    keep: Annotated[Path | None, typer.Option(help="Keep captures in this directory and use them again.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure exit heads and routers on held-out files."""
    plan = Plan(data, heads.split(","), [int(c) for c in checkpoints.split(",")], router_head, limit, steps)
    if router_head not in plan.kinds:
        raise typer.BadParameter(f"--router-head {router_head} must be one of --heads {heads}")
    report = Report("calibration_quality", models=models, **asdict(plan))
    with tempfile.TemporaryDirectory() as temporary:
        for name in models.split(","):
            measure(report, name, plan, (keep or Path(temporary)) / name)
    report.finish(json)


def measure(report: Report, name: str, plan: Plan, directory: Path) -> None:
    """Capture one demo model, train everything, and record the figures of the test files."""
    loaded = load_model(str(DEMO_MODELS / name), "fp32")
    model = FrozenModel(loaded.model)
    captured = capture_model(loaded, plan, directory)
    heads, seconds = train_heads(model, captured, plan)
    judged = [(checkpoint, plan.router_head) for checkpoint in plan.places]
    routers = {exit: train_routers(heads[exit], captured) for exit in judged}
    test = trace_split(captured, "test", model.lm_head, heads, routers)
    _report_heads(report, name, test, plan, seconds)
    _report_routers(report, name, test, judged)


def _report_heads(report: Report, model: str, test: SplitTrace, plan: Plan, seconds: dict[str, float]) -> None:
    rows = []
    for c in plan.places:
        shares = {kind: float(test.exits[c, kind].agrees.mean()) for kind in plan.kinds}
        rows.append([str(c), *(f"{share:.1%}" for share in shares.values())])
        for kind, share in shares.items():
            report.add(f"{model}_agreement_{kind.replace(':', '_')}_{c}", share)
        _row(report, model, "agreement", checkpoint=c, **shares)
    rows.append(["s to train one", *(f"{seconds[kind]:.1f}" for kind in plan.kinds)])
    caption = f"how often the exit's likeliest token is the model's, {len(test.window):,} held-out tokens."
    report.table(f"{model}, agreement of exit heads", ["layers", *plan.kinds], rows, caption)


def _report_routers(report: Report, model: str, test: SplitTrace, judged: Sequence[Exit]) -> None:
    names = list(test.exits[judged[0]].scores)
    rows = [[str(exit[0]), *(_router_cell(report, model, test.exits[exit], name) for name in names)] for exit in judged]
    caption = (
        "area under agreement against coverage, tokens in the router's order; beside it the share of tokens that may exit "
        "while 1% / 5% of all tokens disagree."
    )
    headings = ["layers", *(ROUTERS.get(name, name.replace("_", " ")) for name in names)]
    report.table(f"{model}, routers of head `{judged[0][1]}`", headings, rows, caption)


def _router_cell(report: Report, model: str, trace: ExitTrace, router: str) -> str:
    scores, c = trace.scores[router], trace.checkpoint
    area = area_under_agreement(scores, trace.agrees)
    at_1, at_5 = (share_exiting(scores, trace.agrees, disagreement) for disagreement in (0.01, 0.05))
    report.add(f"{model}_auacc_{router}_{c}", area)
    report.add(f"{model}_exit1_{router}_{c}", at_1)
    report.add(f"{model}_exit5_{router}_{c}", at_5)
    _row(report, model, "router", checkpoint=c, router=router, head=trace.head, area=area, exit1=at_1, exit5=at_5)
    return f"{area:.3f} ({at_1:.0%} / {at_5:.0%})"


def area_under_agreement(scores: NDArray[np.floating], agrees: NDArray[np.bool_]) -> float:
    """Mean, over all coverages 1/n … 1, of the share of exited tokens that agree; tokens of one score exit together.

    1 - AURC of selective classification (Geifman & El-Yaniv 2017). A router that knows nothing gets the exit's mean agreement.
    """
    covered, right = _curve(scores, agrees)
    steps = np.diff(covered, prepend=0)
    return float((steps * right / covered).sum() / covered[-1])


def share_exiting(scores: NDArray[np.floating], agrees: NDArray[np.bool_], disagreement: float) -> float:
    """The largest share of tokens that may exit by one threshold while at most ``disagreement`` of *all* tokens are wrong.

    The same rate as the certificate's: tokens that do not exit run to the end and are right.
    """
    covered, right = _curve(scores, agrees)
    allowed = covered[covered - right <= disagreement * len(agrees)]
    return float(allowed[-1] / len(agrees)) if len(allowed) else 0.0


def _curve(scores: NDArray[np.floating], agrees: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Exited tokens and those of them that agree, at every threshold that some token has as its score."""
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    return last + 1, np.cumsum(agrees[order])[last].astype(np.int64)


def _row(report: Report, model: str, table: str, **values: Any) -> None:
    report.rows.append({"model": model, "table": table, **values})


if __name__ == "__main__":
    typer.run(main)
