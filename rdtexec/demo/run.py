"""The demo's script: make a checkpoint, compile, start the fleet, sync, compare, print."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from attrs import frozen
from rich.console import Console

from rdtexec.demo.checkpoint import OWNERS, write_checkpoint
from rdtexec.demo.fleet import Child, children, collect, context, new_authkey
from rdtexec.demo.processes import WorkerSpec, consumer_main, producer_main
from rdtplan.compiler import Fleet, compile_plan
from rdtplan.errors import TransferError
from rdtplan.inputs.manifests import read_manifest
from rdtplan.inputs.owners import read_owner_rules
from rdtplan.ir.file import write_plan
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.topology import InferenceTopology, TransferSettings, consumer_id, positions
from rdtplan.report.tables import table
from rdtplan.report.units import human_bytes

ROUNDS = 3
TRAINER_RANKS = 2
TOPOLOGY = InferenceTopology(tensor_parallel=2, expert_parallel=True)
TRANSPORTS = ("local", "nixl")
ANSWER_TIMEOUT_S = 180.0


@frozen
class TransportResult:
    """What the syncs over one transport came to."""

    transport: str
    seconds: tuple[float, ...]
    """A sync: the slowest worker."""
    compared: int
    """Parameters and buffers compared, over all workers and syncs."""
    wrong: tuple[str, ...]
    """`sync 1, worker 0: name` of each that differs."""


def run_demo(*, directory: str | None, fault: str | None, as_json: bool) -> int:
    """Run the demo; 0 when every parameter of every worker was byte-exact after every sync, 1 otherwise."""
    os.environ.setdefault("RDTEXEC_LOG_LEVEL", "WARNING")  # the table says what each sync was
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="rdtplan-demo-") as temporary:
        base = Path(directory or temporary)
        ctx = context()
        ctx.Process(target=_nothing, daemon=True).start()  # the fork server imports vLLM while we compile
        started = time.perf_counter()
        checkpoints = [base / f"checkpoint-{i}" for i in range(ROUNDS)]
        for i, checkpoint in enumerate(checkpoints):
            write_checkpoint(checkpoint, seed=1000 + i)
        (base / "owners.toml").write_text(OWNERS)
        console.print(f"made {ROUNDS} random Qwen3-MoE checkpoints in {base}")
        plan, digest = _compile(base, checkpoints[0])
        console.print(
            f"compiled {base / 'fleet.plan'} in {time.perf_counter() - started:.1f} s "
            f"({plan.overview.source_names} source names, digest {digest[:12]})"
        )
        results = _run_fleet(ctx, base, checkpoints, fault, console)
        if as_json:
            print(json.dumps(_as_dict(plan, results)))
        else:
            _print_table(console, plan, results)
            if directory:
                console.print(
                    f"the plan stays in {base / 'fleet.plan'}; look at it with: rdtplan inspect {base / 'fleet.plan'}"
                )
    return 1 if any(r.wrong for r in results) else 0


def _nothing() -> None:
    """Starts the fork server."""


def _compile(base: Path, checkpoint: Path) -> tuple[FleetPlan, str]:
    fleet = Fleet(
        topology=TOPOLOGY,
        trainer_ranks=TRAINER_RANKS,
        owner_rules=read_owner_rules(base / "owners.toml", TRAINER_RANKS),
        settings=TransferSettings(stages_in_flight=2),
    )
    plan = compile_plan(checkpoint, read_manifest(checkpoint), fleet, jobs=1)
    return plan, write_plan(plan, base / "fleet.plan")


def _run_fleet(
    ctx: Any, base: Path, checkpoints: list[Path], fault: str | None, console: Console
) -> list[TransportResult]:
    authkey = new_authkey()
    plan_path = str(base / "fleet.plan")
    mains: dict[str, Any] = {
        f"producer {rank}": (producer_main, (plan_path, rank, authkey, 60.0, fault == "flip-byte"))
        for rank in range(TRAINER_RANKS)
    }
    for position in positions(TOPOLOGY):
        cid = consumer_id(TOPOLOGY, 0, position)
        spec = WorkerSpec(str(checkpoints[0]), plan_path, TOPOLOGY, position, cid, authkey)
        mains[f"worker {cid}"] = (consumer_main, (spec,))
    with children(ctx, mains) as fleet:
        producers = [c for name, c in fleet.items() if name.startswith("producer")]
        workers = [c for name, c in fleet.items() if name.startswith("worker")]
        return [_run_transport(t, producers, workers, checkpoints, console) for t in TRANSPORTS]


def _run_transport(
    transport: str, producers: list[Child], workers: list[Child], checkpoints: list[Path], console: Console
) -> TransportResult:
    for child in producers:
        child.tell("start", transport)
    answers = collect(producers, ANSWER_TIMEOUT_S)
    addresses = {rank: answers[child.name] for rank, child in enumerate(producers)}
    for child in workers:
        child.tell("start", (transport, addresses))
    collect(workers, ANSWER_TIMEOUT_S)
    seconds: list[float] = []
    compared, wrong = 0, []
    for number, checkpoint in enumerate(checkpoints):
        for child in producers:
            child.tell("sync", (number, str(checkpoint)))
        for child in workers:
            child.tell("sync", number)
        answers = collect([*producers, *workers], ANSWER_TIMEOUT_S)
        seconds.append(max(answers[child.name].seconds for child in workers))
        for child in workers:
            child.tell("check", str(checkpoint))
        for name, (n, names) in collect(workers, ANSWER_TIMEOUT_S).items():
            compared += n
            wrong += [f"sync {number}, {name}: {wrong_name}" for wrong_name in names]
    console.print(f"{transport}: {len(checkpoints)} syncs done and compared")
    if not compared:
        raise TransferError("nothing was compared", code="RDT622")
    return TransportResult(transport, tuple(seconds), compared, tuple(wrong))


def _as_dict(plan: FleetPlan, results: list[TransportResult]) -> dict[str, Any]:
    o = plan.overview
    return {
        "bytes_per_worker": list(o.pulled_nbytes),
        "bytes_broadcast": o.manifest_nbytes,
        "pulls": list(o.pulls),
        "streams": list(o.streams),
        "transports": {
            r.transport: {"seconds": list(r.seconds), "compared": r.compared, "wrong": list(r.wrong)} for r in results
        },
    }


def _print_table(console: Console, plan: FleetPlan, results: list[TransportResult]) -> None:
    o = plan.overview
    title = f"{TRAINER_RANKS} trainer ranks (2 pipeline stages) -> {plan.topology.workers} workers (TP2 + EP)"
    headings = ("transport", "bytes/worker", "broadcast", "pulls", "chunks", "streams", "ms per sync", "byte-exact")
    rows = [
        [
            r.transport,
            human_bytes(max(o.pulled_nbytes)),
            human_bytes(o.manifest_nbytes),
            str(max(o.pulls)),
            str(sum(o.pulls)),
            str(max(o.streams)),
            " ".join(f"{1e3 * s:.0f}" for s in r.seconds),
            f"{r.compared - len(r.wrong)} of {r.compared}",
        ]
        for r in results
    ]
    for line in table(title, headings, rows, console.width):
        click.echo(line)
    for r in results:
        console.print(f"{r.transport}: {r.compared - len(r.wrong)} of {r.compared} parameters byte-exact")
        for line in r.wrong[:8]:
            console.print(f"WRONG BYTES over {r.transport}: {line}", style="bold red")
