"""The virtual clock: the runtime's rules hold on it, bytes add up, and no schedule beats the links."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import Scenario, Sizes, make_plan, scenarios

from rdtplan.cli import main
from rdtplan.cli_report import runtime_rules
from rdtplan.ir.file import write_plan
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.topology import InferenceTopology, TransferSettings
from rdtplan.ir.view import PlanInMemory
from rdtplan.report.simulate import Costs, Simulation, simulate
from rdtplan.report.timeline import links

SIZES = Sizes(
    layers=8, dense_layers=0, hidden=64, experts=8, heads=8, kv_heads=8, head_dim=8, intermediate=64, vocab=64
)
BASE = Scenario(sizes=SIZES, topology=InferenceTopology(2), trainer_ranks=2)
COSTS = Costs(bandwidth=1e9, latency_s=1e-6)


def run(plan: FleetPlan, costs: Costs = COSTS, transport: str = "nixl") -> Simulation:
    return simulate(PlanInMemory(plan), costs, runtime_rules(transport))


@settings(max_examples=30)
@given(
    scenarios(),
    st.sampled_from((1e6, 1e9)),
    st.sampled_from((0.0, 1e-6, 1e-3)),
    st.sampled_from((0.0, 1e-4)),
    st.sampled_from((math.inf, 1e6)),
    st.booleans(),
    st.sampled_from(("nixl", "local")),
)
def test_every_plan_runs_to_its_end_by_the_runtimes_rules(
    s: Scenario, bandwidth: float, latency: float, gather: float, scatter: float, first: bool, transport: str
) -> None:
    plan = make_plan(s)
    costs = Costs(bandwidth, latency, gather, scatter, first)
    found = run(plan, costs, transport)
    assert Counter((p.consumer, p.chunk) for p in found.pulls) == Counter(
        (c.consumer_id, k) for c in plan.consumers for k in range(len(c.program.chunks))
    )
    assert found.seconds >= found.floor_s * (1 - 1e-6)
    published = {(g.producer, g.group): g for g in found.groups}
    for p in found.pulls:
        g = published[p.producer, p.group]
        assert p.issued <= p.ready <= p.landed <= p.scattered
        assert g.started <= g.published <= p.ready and (p.landed if transport == "nixl" else p.scattered) <= g.released
        assert p.landed - p.ready >= p.nbytes / bandwidth * (1 - 1e-6) - 2e-9
    for c in plan.consumers:
        lanes = 1 if first else min(s.settings.stages_in_flight, len(set(c.program.chunks.stream)) or 1)
        window = 1 if first else s.settings.num_rdt_buffers
        mine = [p for p in found.pulls if p.consumer == c.consumer_id]
        for p in mine:
            flying = [q for q in mine if q.issued <= p.issued < q.landed]
            assert len(flying) <= lanes * window
    for rank in range(s.trainer_ranks):
        mine_groups = [g for g in found.groups if g.producer == rank]
        for g in mine_groups:
            resident = [h for h in mine_groups if h.started <= g.started < h.released]
            assert len(resident) <= s.settings.gather_lookahead + 1
    assert run(plan, costs, transport) == found, "a simulation must be deterministic"


def test_a_full_window_keeps_links_busy() -> None:
    """No gather and no latency to speak of: the links are the whole of it."""
    found = run(make_plan(BASE), Costs(1e6, 0.0))
    assert found.of_floor < 1.01 and found.bottleneck.startswith("the link of ")


def test_a_slow_gather_is_named() -> None:
    found = run(make_plan(BASE), Costs(1e12, 0.0, gather_s=0.01))
    assert found.bottleneck.startswith("the gather of trainer rank")


def test_latency_is_named() -> None:
    found = run(make_plan(BASE), Costs(1e12, 0.1))
    assert "latency" in found.bottleneck or "free barrier" in found.bottleneck


def test_no_lookahead_means_no_overlap() -> None:
    """gather and transfer take turns with lookahead 0, and overlap with 1."""
    nbytes = max(g.nbytes for g in make_plan(BASE).groups)
    costs = Costs(bandwidth=1e6, latency_s=0.0, gather_s=nbytes / 2 / 1e6)
    alone = run(make_plan(evolve(BASE, settings=TransferSettings(gather_lookahead=0))), costs)
    ahead = run(make_plan(evolve(BASE, settings=TransferSettings(gather_lookahead=1))), costs)
    assert alone.seconds > 1.5 * ahead.seconds
    assert "take turns" in alone.bottleneck


def test_the_first_sync_is_serial() -> None:
    found = run(make_plan(BASE), evolve(COSTS, first_sync=True))
    for c in (0, 1):
        mine = sorted((p for p in found.pulls if p.consumer == c), key=lambda p: p.issued)
        assert all(a.landed <= b.issued for a, b in pairwise(mine))


def test_links_and_streams_add_up() -> None:
    plan = make_plan(evolve(BASE, ownership="pipeline", trainer_ranks=4, seed=1))
    found = run(plan)
    total = sum(plan.overview.pulled_nbytes)
    for end in ("producer", "consumer", "stream"):
        rows = links(found, end)
        assert sum(r["nbytes"] for r in rows) == total
        assert all(0 <= r["utilization"] <= 1 + 1e-6 for r in rows)
    assert len(links(found, "stream")) == max(plan.overview.streams)


# -- a recorded run laid over it -----------------------------------------------------------------------------------


def record(role: str, number: int, sync: int, **more: Any) -> str:
    return json.dumps({"role": role, "id": number, "sync": sync, **more})


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    plan = make_plan(BASE)
    write_plan(plan, tmp_path / "p")
    found = run(plan)
    mine = sorted((p for p in found.pulls if p.consumer == 0), key=lambda p: p.chunk)
    chunks = [[p.chunk, 5 + p.issued, 5 + p.ready, 5 + p.landed + (1 if p.chunk == 3 else 0), 9] for p in mine]
    lines = [
        record("consumer", 0, 0, seconds=9.0),
        record(
            "consumer", 0, 1, seconds=2.0, bytes=sum(p.nbytes for p in mine), pulls=len(mine), wait_s=0.5, chunks=chunks
        ),
        record("consumer", 1, 1, seconds=3.0, bytes=17, future=[1, 2]),
        record("producer", 0, 1),
        record("watcher", 0, 1),
        "",
    ]
    (tmp_path / "run.jsonl").write_text("\n".join(lines))
    return tmp_path / "p", tmp_path / "run.jsonl"


def invoke(*args: str | Path) -> Any:
    return CliRunner().invoke(main, [str(a) for a in args])


def test_a_recorded_run_is_laid_over_the_prediction(files: tuple[Path, Path]) -> None:
    plan, recorded = files
    arguments = ("simulate", plan, "--bandwidth", "1GB/s", "--latency", "1us", "--actual", recorded)
    shown = invoke(*arguments)
    assert shown.exit_code == 0, shown.output
    assert "recorded run, sync 1" in shown.output and "another plan ran" in shown.output
    assert "consumer 1 recorded 17 bytes" in shown.output and "0:3" in shown.output
    data = json.loads(invoke(*arguments, "--json").output)["actual"]
    assert [(r["role"], r["id"], r["actual_s"]) for r in data["processes"]] == [
        ("consumer", 0, 2.0),
        ("consumer", 1, 3.0),
        ("producer", 0, None),
    ]
    assert data["late_chunks"][0]["label"] in shown.output.partition("landed latest")[2]
    assert data["late_chunks"][0]["chunk"] == 3 and 0.99 < data["late_chunks"][0]["late_s"] < 1.01
    earlier = json.loads(invoke(*arguments, "--json", "--actual-sync", "0").output)["actual"]
    assert earlier["sync"] == 0 and len(earlier["processes"]) == 1


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "nonsense", '{"role": "consumer", "id": "0", "sync": 1}', "[" * 10000]
)
def test_a_file_without_a_run_is_refused(files: tuple[Path, Path], text: str) -> None:
    plan, recorded = files
    recorded.write_text(text)
    shown = invoke("simulate", plan, "--actual", recorded)
    assert shown.exit_code == 1 and "RDT108" in shown.output and "Traceback" not in shown.output


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (record("consumer", 2, 1), "consumer 2 was recorded, the plan has workers 0-1"),
        (record("producer", 7, 1), "producer 7 was recorded, the plan has trainer ranks 0-1"),
        (record("consumer", 0, 1, seconds=-1.5), "line 1: seconds is -1.5"),
        (record("watcher", 0, 1), "no record of a consumer or producer"),
    ],
)
def test_records_of_another_fleet_are_refused(files: tuple[Path, Path], line: str, words: str) -> None:
    files[1].write_text(line)
    shown = invoke("simulate", files[0], "--actual", files[1])
    assert shown.exit_code == 1 and "RDT108" in shown.output and words in shown.output, shown.output


def test_a_sync_that_was_not_recorded_is_named(files: tuple[Path, Path]) -> None:
    shown = invoke("simulate", files[0], "--actual", files[1], "--actual-sync", "9")
    assert shown.exit_code == 1 and "--actual-sync 9: " in shown.output and "has syncs 0-1" in shown.output


def test_wrong_costs_are_refused(files: tuple[Path, Path]) -> None:
    for option, value in (
        ("--bandwidth", "0"),
        ("--latency", "x"),
        ("--gather-time", "-1"),
        ("--scatter-bandwidth", "z"),
        ("--scatter-bandwidth", ""),
        ("--latency", "1e400"),
        ("--gather-time", "1e300s"),
        ("--bandwidth", "1e300GB/s"),
        ("--bandwidth", "1e-300"),
        ("--bandwidth", "1.2.3"),
    ):
        shown = invoke("simulate", files[0], option, value)
        assert shown.exit_code == 1 and "RDT108" in shown.output and option in shown.output
    for option, value in (("--latency", "1e9s"), ("--bandwidth", "5e-1GB/s"), ("--bandwidth", "1e9")):
        assert invoke("simulate", files[0], option, value).exit_code == 0, (option, value)


def test_a_timeline_is_never_folded(files: tuple[Path, Path]) -> None:
    """Where it does not fit it is left out."""
    for columns in (40, 60, 70, 80, 100):
        shown = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, ["simulate", str(files[0])]).output
        lines = [line for line in shown.splitlines() if set(line) & set("▁▂▃▄▅▆▇█")]
        assert all(len(line) <= columns and line.strip("▁▂▃▄▅▆▇█ ") for line in lines), shown
        assert len(lines) + shown.count("(not shown at this width: use over") == 3, shown
