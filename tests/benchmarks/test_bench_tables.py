"""Tables of tide-bench's runs, from synthetic rows."""

from __future__ import annotations

from bench.synthetic_runs import row
from tide_bench.table import HEADINGS, cells

from benchmarks.tables import __main__ as tables
from benchmarks.tables.bench_tables import SUMMARY_ARMS, bench_table, predecessor_table, summary_table

SETTINGS = {"mode": "decode", "model": "tiny", "new_tokens": 8}


def test_every_row_has_a_cell_for_every_heading() -> None:
    """Columns of the tables would slip."""
    failed = {"arm": "genai", "title": "genai", "batch": 1, "prompt_tokens": 8, "note": "no wheel"}
    for mode in ("decode", "prefill"):
        assert {len(cells(mode, r)) for r in (row("full", 1.0, rank=1), failed)} == {len(HEADINGS[mode])}
    served = {"arm": "full", "title": "full", "rate": 2.0, "share": 0.5, "tokens_per_s": 9.0}
    served |= {f"{name}{end}": 1.0 for name in ("first_token_ms", "request_ms") for end in ("", "_p95")}
    assert len(cells("load", served)) == len(cells("load", failed)) == len(HEADINGS["load"])


def test_a_table_shows_why_an_arm_is_not_ranked() -> None:
    """README would show a speed that was bought with another text."""
    rows = [row("full", 1.0, rank=1), row("static-skip", 3.0, mark="promises nothing about its text")]
    table = bench_table({"settings": SETTINGS, "rows": rows}, "today, here")
    assert "| – | <static-skip> |" in table and "- <static-skip>: promises nothing about its text" in table


def test_readmes_table_shows_batch_1_in_its_own_order() -> None:
    """README would show another batch size's speed, or drop the column that says whether the text is the model's."""
    order = (*reversed(SUMMARY_ARMS), "compile")
    rows = [row(arm, 1.0, rank=1, prompt_tokens=8) for arm in order] + [row("full", 9.0, batch=8, rank=1, prompt_tokens=8)]
    settings = SETTINGS | {"prompt_tokens": [8]}
    lines = summary_table({"settings": settings, "rows": rows}, "today, here").splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("| <")] == [f"| <{arm}>" for arm in SUMMARY_ARMS]
    assert "as `full`" in next(line for line in lines if line.startswith("| arm"))


def test_the_predecessors_terms_keep_their_signs() -> None:
    """A prompt that takes half as long would be called slower, or twice the throughput a loss."""
    prefill = {"settings": SETTINGS, "rows": [row("full", 2.0), row("predecessor", 0.8)]}
    decode = {"settings": SETTINGS, "rows": [row("full", 2.0), row("predecessor", 0.8), row("full", 1.5, batch=8)]}
    lines = predecessor_table(decode, prefill, "today, here").splitlines()
    latency = next(line for line in lines if line.startswith("| prefill latency | 1 |"))
    assert "-7.2%" in latency and "| -50.0% |" in latency and "| +25.0% |" in latency
    throughput = next(line for line in lines if line.startswith("| throughput | 1 |"))
    assert "+6.6%" in throughput and "| +100.0% |" in throughput and "| -20.0% |" in throughput
    assert "| +50.0% |" in next(line for line in lines if "Qwen3" in line)


def test_every_table_names_the_instruction_sets() -> None:
    """A reader with an AVX2 laptop would expect the speed of a server with AVX512."""
    machine: dict[str, object] = {
        "cpu": "AMD EPYC",
        "instructions": "SSE4.1 AVX AVX2",
        "cores": 2,
        "onnxruntime": "1.32.0",
        "torch": "2.13.0",
    }
    run = {"date": "2026-11-27T00:00:00+00:00", "machine": machine}
    assert "AMD EPYC, SSE4.1 AVX AVX2, 2 cores" in tables._where(run)
    del machine["instructions"]
    assert "AMD EPYC, 2 cores" in tables._where(run)  # earlier runs did not note them
