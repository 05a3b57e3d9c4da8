#!/usr/bin/env python
"""Many syncs in a row, with new weights in each: is every parameter right, and does no process grow?

usage: python tools/soak.py [--transport local|nixl|ray_rdt] [--syncs 1000] [--check-every 1] [--vllm]

Real processes of a synthetic plan (two trainer ranks, two workers, two streams), or with --vllm one process with a
real vLLM engine, its worker and its trainer. Every Nth sync each parameter of each worker is compared, byte for byte:
with what stock loaders would have left, or with a fresh engine on the same checkpoint. Prints what every process holds
at the start (after the first three syncs), after a tenth, and at the end. Exit code 1 when a parameter is wrong or
something has grown between a tenth and the end: a descriptor, a thread, a file in /dev/shm, or resident memory by more
than 16 MiB and 5 %.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parent.parent))

WARM = 3
GROWTH_NBYTES = 16 << 20
GROWTH = 1.05
Usage = dict[str, dict[str, int]]
"""Process -> what it holds."""


def grown(tenth: Usage, end: Usage) -> list[str]:
    """What has grown, in words."""
    found = []
    for process, now in end.items():
        before = tenth[process]
        for what in ("descriptors", "threads", "tasks", "shm"):
            if now[what] > before[what]:
                found.append(f"{process}: {what} {before[what]} -> {now[what]}")
        if now["rss"] > max(before["rss"] * GROWTH, before["rss"] + GROWTH_NBYTES):
            found.append(f"{process}: resident memory {before['rss']:,} -> {now['rss']:,}")
    return found


def table(moments: dict[str, Usage]) -> str:
    """A Markdown table: start, a tenth, end."""
    lines = [
        "| process | resident MiB | descriptors | Python threads | threads | files in /dev/shm |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for process in next(iter(moments.values())):
        cells = [
            " / ".join(
                f"{u[process][what] / (1 << 20):.0f}" if what == "rss" else str(u[process][what])
                for u in moments.values()
            )
            for what in ("rss", "descriptors", "threads", "tasks", "shm")
        ]
        lines.append(f"| {process} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def moments_of(syncs: int) -> dict[int, str]:
    """Number of syncs done -> name of the moment."""
    return {WARM: "start", max(WARM + 1, syncs // 10): "a tenth", syncs: "end"}


def soak_fleet(
    transport: str, syncs: int, check_every: int, directory: Path
) -> tuple[dict[str, Usage], list[str], int]:
    """(usage by moment, what was wrong, comparisons made) of processes with a synthetic plan."""
    from rdtplan.ir.topology import InferenceTopology, TransferSettings
    from tests.fleet import running
    from tests.plans import Scenario, Sizes
    from tests.ray_cluster import ray_cluster

    scenario = Scenario(
        Sizes(layers=2, dense_layers=1),
        InferenceTopology(tensor_parallel=2, expert_parallel=True),
        TransferSettings(stages_in_flight=2),
        trainer_ranks=2,
        ownership="pipeline",
        seed=1,
    )
    moments: dict[str, Usage] = {}
    wrong: list[str] = []
    compared = 0
    at = moments_of(syncs)
    with ray_cluster() if transport == "ray_rdt" else contextlib.nullcontext("") as address:
        with running(scenario, directory, transport, ray_address=address, stall_timeout_s=120.0) as fleet:
            for sync in range(syncs):
                fleet.sync(sync)
                if sync % check_every == 0 or sync + 1 == syncs:
                    compared += 1
                    wrong += [f"sync {sync}: {w}: {names}" for w, names in fleet.wrong(sync).items()]
                if sync + 1 in at:
                    held = fleet.ask(fleet.everyone, "usage")
                    moments[at[sync + 1]] = {c.name: u for c, u in zip(fleet.everyone, held, strict=True)}
    return moments, wrong, compared


def soak_vllm(transport: str, syncs: int, check_every: int, directory: Path) -> tuple[dict[str, Usage], list[str], int]:
    """The same of one process with a vLLM engine, whose weights go back and forth between two checkpoints."""
    from tests import vllm_sync
    from tests.fleet import usage

    trial = vllm_sync.Trial("LlamaForCausalLM", directory)
    trial.start()
    trainer = trial.trainer(transport=transport)
    moments: dict[str, Usage] = {}
    wrong: list[str] = []
    compared = 0
    at = moments_of(syncs)
    for sync in range(syncs):
        seed = "AB"[sync % 2]
        if sync % check_every == 0 or sync + 1 == syncs:
            compared += 1
            found = trial.sync(trainer, seed)
            if not found["generation_equal"] or found["different"] or found["moved"]:
                wrong.append(f"sync {sync}: {found}")
        else:
            trial.source.use(trial.checkpoints[seed])
            trainer.send_weights()
        if sync + 1 in at:
            moments[at[sync + 1]] = {"vLLM engine and trainer": usage()}
    trainer.shutdown()
    return moments, wrong, compared


@click.command()
@click.option("--transport", type=click.Choice(["local", "nixl", "ray_rdt"]), default="local", show_default=True)
@click.option("--syncs", type=click.IntRange(10), default=1000, show_default=True)
@click.option("--check-every", type=click.IntRange(1), default=1, show_default=True, help="Compare every Nth sync.")
@click.option("--vllm", is_flag=True, help="With a real vLLM engine in this process.")
def main(transport: str, syncs: int, check_every: int, vllm: bool) -> None:
    """Many syncs in a row, with new weights in each."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        soak = soak_vllm if vllm else soak_fleet
        moments, wrong, compared = soak(transport, syncs, check_every, Path(scratch))
    what = "a vLLM engine" if vllm else "two ranks, two workers"
    click.echo(f"{syncs:,} syncs over {transport}, {what}, {compared:,} compared, {time.monotonic() - started:.0f} s")
    click.echo(f"each cell: {' / '.join(moments)}\n")
    click.echo(table(moments))
    wrong += grown(moments["a tenth"], moments["end"])
    for line in wrong:
        click.echo(f"WRONG {line}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
