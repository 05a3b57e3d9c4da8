"""Compiler figures on Qwen3-235B-A22B, beside the peer in the same run.

    python tools/bench/compiler.py [--ep 0|1] [--work DIRECTORY]
    python tools/bench/compiler.py --layout dp72-ep|tp8x9|dp8-ep [--loaders] [--work DIRECTORY]

The second form compiles the plan of a whole fleet as a command and verifies it whole as another, each with its wall and
CPU seconds (of all its processes), peak memory and the size of the plan; `--loaders` also runs the loaders again
(`verify --model`). The first form:

1. `rdtplan compile` of TP8 (+ EP8), 8 trainer ranks, as a command: seconds, peak resident memory, bytes of the plan.
2. One worker rank traced by us and baked by vLLM's in-process backend (`sharded_rdt`), on the same meta model,
   alternating in one process; the ratio of the medians of CPU seconds (both are one thread, and other load does not
   count).
3. One worker's part of the plan loaded and verified, against the bake that a worker of the peer runs at init.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import qwen3_235b

from rdtplan.inputs.manifests import read_manifest
from rdtplan.ir.manifest import build_manifest
from rdtplan.ir.topology import InferenceTopology, Position

REPEATS = 5
LAYOUTS = {
    "dp72-ep": ["--dp", "72", "--ep"],
    "tp8x9": ["--tp", "8", "--replicas", "9"],
    "dp8-ep": ["--dp", "8", "--ep"],
}
"""Options of `rdtplan compile`; trainers have 8 ranks."""


def whole_fleet(work: Path, layout: str, loaders: bool) -> None:
    """Compile and verify the plan of a fleet, each as a command."""
    plan = work / f"{layout}.plan"
    inputs = [str(work), "--manifest", str(work / "manifest.json"), "--trainer-ranks", "8", *LAYOUTS[layout]]
    seconds = _command("compile", *inputs, "-o", str(plan))
    print(f"plan {plan.stat().st_size / 1e6:.2f} MB")
    seconds += _command("verify", str(plan))
    print(f"together {seconds:.0f} CPU s: {seconds / 2 / 60:.1f} minutes of two cores that do nothing else")
    if loaders:
        _command("verify", str(plan), "--model", str(work))


def _command(*arguments: str) -> float:
    """Run one command of the CLI, print what it took, and return its CPU seconds."""
    started = time.perf_counter()
    before = os.times()
    process = subprocess.Popen([sys.executable, "-m", "rdtplan.cli", *arguments])
    peak = watch_memory(process)
    if process.returncode:
        sys.exit(f"rdtplan {' '.join(arguments)} failed with {process.returncode}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    wall = time.perf_counter() - started
    print(f"{arguments[0]}: {wall:.1f} s, {cpu:.1f} CPU s, {peak / 1e9:.2f} GB resident (all processes)")
    return cpu


def compile_as_command(work: Path, expert_parallel: bool) -> Path:
    """Run the CLI, print time, memory and size, and return the plan."""
    plan = work / f"tp8-ep{int(expert_parallel)}.plan"
    command = [sys.executable, "-m", "rdtplan.cli", "compile", str(work), "--manifest", str(work / "manifest.json")]
    command += ["--tp", "8", "--trainer-ranks", "8", "-o", str(plan), *(["--ep"] if expert_parallel else [])]
    started = time.perf_counter()
    process = subprocess.Popen(command)
    peak = watch_memory(process)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed with {process.returncode}")
    seconds = time.perf_counter() - started
    print(f"compile, all 8 workers: {seconds:.1f} s, {peak / 1e9:.2f} GB resident (all processes), ", end="")
    print(f"plan {plan.stat().st_size / 1e6:.2f} MB")
    return plan


def watch_memory(process: subprocess.Popen[bytes]) -> int:
    """Peak of the summed proportional set size of a process and its children, bytes, sampled until it ends."""
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(_pss(pid) for pid in _family(process.pid)))
        time.sleep(0.2)
    return peak


def _family(pid: int) -> list[int]:
    found = [pid]
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                found += _family(int(child))
    except OSError:
        pass
    return found


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def trace_against_peer(work: Path, expert_parallel: bool) -> float:
    """Alternate both recorders over one model; print medians and the ratio, return the peer's median."""
    import torch

    from rdtplan.trace.dry_run import meta_sources, trace_model
    from rdtplan.trace.model import build_model, engine_config
    from rdtplan.trace.ranks import simulated_rank

    manifest = build_manifest(read_manifest(work / "manifest.json"))
    topology, position = InferenceTopology(8, expert_parallel=expert_parallel), Position(0, 0, 3)
    config = engine_config(work, topology, position)
    from vllm.config import set_current_vllm_config
    from vllm.distributed.weight_transfer.sharded_rdt_engine import ShardedRDTWeightTransferEngine

    ours: list[float] = []
    bare: list[float] = []
    peer: list[float] = []
    loaders: list[float] = []
    with simulated_rank(config, topology, position), set_current_vllm_config(config):
        model = build_model(config, meta=True)
        info: Any = SimpleNamespace(
            names=list(manifest.names),
            dtype_names=[manifest.dtype(k) for k in range(len(manifest))],
            shapes=[list(manifest.shape(k)) for k in range(len(manifest))],
        )
        for _ in range(REPEATS):
            started = time.thread_time()
            trace = trace_model(model, manifest, position, unseen=False)
            ours.append(time.thread_time() - started)
            started = time.thread_time()
            trace_model(model, manifest, position, provenance=False, unseen=False)
            bare.append(time.thread_time() - started)
            engine: Any = object.__new__(ShardedRDTWeightTransferEngine)
            engine.model, engine.device, engine._name_to_plan = model, torch.device("cpu"), {}
            started = time.thread_time()
            engine._bake(info)
            peer.append(time.thread_time() - started)
            sources = meta_sources(manifest)
            started = time.thread_time()
            model.load_weights(iter(zip(manifest.names, sources, strict=True)))  # type: ignore[operator]
            loaders.append(time.thread_time() - started)
    a, n, b, c = (statistics.median(x) for x in (ours, bare, peer, loaders))
    print(f"one worker, {len(trace.fetches):,} writes: peer's bake {b:.2f} CPU s (it records op chains)")
    print(f"  traced with op chains beside the regions: {a:.2f} CPU s, {b / a:.2f}x")
    print(f"  traced without: {n:.2f} CPU s, {b / n:.2f}x; vLLM's loaders alone over meta tensors: {c:.2f}")
    return b


def load_against_peer(plan: Path, peer_s: float) -> None:
    """Load and verify one worker's part in fresh processes, without vLLM."""
    code = (
        "import time,sys; from rdtexec.plans import load_worker; t=time.perf_counter(); "
        "load_worker(sys.argv[1], 3); print(time.perf_counter()-t)"
    )
    times = [
        float(
            subprocess.run([sys.executable, "-c", code, str(plan)], capture_output=True, text=True, check=True).stdout
        )
        for _ in range(REPEATS)
    ]
    ours = statistics.median(times)
    print(f"one worker's plan loaded and verified in {ours * 1e3:.0f} ms: {peer_s / ours:.0f}x the peer's bake at init")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--layout", choices=sorted(LAYOUTS))
    parser.add_argument("--loaders", action="store_true")
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        qwen3_235b.write(work)
        if args.layout:
            print(f"{args.layout}, load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")
            whole_fleet(work, args.layout, args.loaders)
            return
        plan = compile_as_command(work, bool(args.ep))
        peer_s = trace_against_peer(work, bool(args.ep))
        load_against_peer(plan, peer_s)
        started = time.perf_counter()
        command = [sys.executable, "-X", "importtime", "-m", "rdtplan.cli", "inspect", str(plan)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - started
        heavy = [m for m in ("torch", "vllm") if f" {m}\n" in shown.stderr]
        print(f"inspect: {seconds:.2f} s, imports of torch or vllm: {', '.join(heavy) or 'none'}")
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"(this benchmark process itself: {own:.2f} GB resident)")


if __name__ == "__main__":
    main()
