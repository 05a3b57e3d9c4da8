"""Real processes for runtime tests: trainer ranks and workers of a synthetic plan, without vLLM.

Weights are random bytes drawn from the sync's number, the same in every process. What a worker must hold is computed
element by element from the loaders' own writes (`tests/plans.py`), so neither canonical regions nor chunks nor packing
are trusted.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from rdtexec.consumer import Consumer
from rdtexec.demo.fleet import Child, children, collect, new_authkey
from rdtexec.demo.processes import poison, serve_commands
from rdtexec.destination import Destination
from rdtexec.plans import load_trainer, load_worker
from rdtexec.producer import Producer
from rdtplan.ir.file import write_plan
from rdtplan.ir.manifest import Manifest
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.topology import consumer_id, positions
from rdtplan.ir.traces import Parameters
from tests.plans import Scenario, elements, load, make_plan

ANSWER_S = 60.0


def full_tensor(manifest: Manifest, k: int, sync: int) -> torch.Tensor:
    """Random bytes of one source name in one sync."""
    generator = torch.Generator().manual_seed(1 + k + 100_003 * sync)
    raw = torch.randint(0, 256, (manifest.nbytes(k),), dtype=torch.uint8, generator=generator)
    return raw.view(getattr(torch, manifest.dtype(k))).view(manifest.shape(k))


class Holder(torch.nn.Module):
    """A leaf module of the destination."""


def destination_model(parameters: Parameters) -> torch.nn.Module:
    """A module tree with the plan's parameters, tied where the plan says so."""
    root = Holder()
    for row, name in enumerate(parameters.names):
        data = torch.empty(parameters.shapes[row], dtype=getattr(torch, parameters.dtypes[row]))
        parameter = torch.nn.Parameter(data, requires_grad=False)
        for path in (name, *parameters.aliases[row]):
            *modules, leaf = path.split(".")
            module: torch.nn.Module = root
            for part in modules:
                if part not in module._modules:
                    module.add_module(part, Holder())
                module = module._modules[part]  # type: ignore[assignment]
            module.register_parameter(leaf, parameter)
    return root


def reference_manifest(scenario: Scenario, plan: FleetPlan) -> Manifest:
    """Full tensors, numbered as `full_tensor` does; a plan whose trainer holds pieces lists those instead."""
    sharded = set(plan.manifest.names) != set(scenario.manifest.names)
    return scenario.manifest if sharded else plan.manifest


def expected_parameters(scenario: Scenario, plan: FleetPlan, consumer: int, sync: int) -> dict[str, torch.Tensor]:
    """What stock loaders would have left in every parameter, element by element, as raw element bytes."""
    program = plan.consumers[consumer].program
    manifest = reference_manifest(scenario, plan)
    order = {name: k for k, name in enumerate(manifest.names)}
    loader = load(scenario.sizes, scenario.manifest, scenario.topology, plan.consumers[consumer].position)
    found: dict[str, torch.Tensor] = {}
    for row, name in enumerate(loader.names):
        dtype = getattr(torch, program.parameters.dtypes[row])
        flat = torch.zeros(loader.view(row).shape, dtype=dtype).view(-1)
        for parameter, view, value, _ in loader.fills:
            if parameter == row:
                flat[elements(view)] = value
        for write in loader.writes:
            if write.parameter == row:
                source = full_tensor(manifest, order[scenario.manifest.names[write.source]], sync).reshape(-1)
                raw, data = _raw(flat), _raw(source)
                raw[elements(write.dest_view)] = data[elements(write.source_view)]
        found[name] = flat
    return found


def _raw(flat: torch.Tensor) -> torch.Tensor:
    """Elements as integers, so that no NaN is ever touched by arithmetic."""
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


@frozen
class Faults:
    """What goes wrong in a producer's source or a worker's hooks."""

    kind: str = ""
    """raise, shape, dtype, order, short, extra, nothing, slow; for a worker: hook."""
    rank: int = 0
    sync: int = 1


class RandomSource:
    """A trainer rank whose weights are `full_tensor`s."""

    def __init__(self, manifest: Manifest, faults: Faults | None) -> None:
        self.manifest, self.faults = manifest, faults
        self.sync = 0
        self.gathered = 0

    def start(self) -> None:
        return None

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        kind = self.faults.kind if self.faults and self.faults.sync == self.sync else ""
        self.gathered += 1
        if kind == "raise" and self.gathered > 1:
            raise ValueError("the trainer's gather broke")
        if kind == "slow" and self.gathered > 1:
            time.sleep(600)
        ordered = list(names)
        if kind == "order" and len(ordered) > 1:
            ordered[0], ordered[1] = ordered[1], ordered[0]
        if kind == "short":
            ordered = ordered[:-1]
        for name in ordered:
            tensor = full_tensor(self.manifest, self.manifest.names.index(name), self.sync)
            if kind == "shape":
                tensor = tensor.reshape(1, *tensor.shape)
            if kind == "dtype":
                tensor = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
            yield name, None if kind == "nothing" else tensor  # type: ignore[misc]
        if kind == "extra":
            yield "model.surprise.weight", torch.zeros(1)


class BrokenHooks:
    """Post-processing that fails on the first module."""

    def materialize(self, module: int) -> None:
        return None

    def complete(self, module: int) -> None:
        raise ValueError(f"post-processing of module {module} broke")


@frozen
class Setup:
    """What every process of a fleet knows."""

    scenario: Scenario
    plan: FleetPlan
    path: str
    transport: str
    authkey: bytes
    stall_timeout_s: float
    faults: Faults | None


def join_ray() -> None:
    """Join the Ray cluster that the test has started and named in RAY_ADDRESS, if there is one."""
    if "RAY_ADDRESS" in os.environ:
        import ray

        ray.init(namespace="fleet", log_to_driver=False, configure_logging=False)


def producer_main(pipe: Connection, setup: Setup, rank: int) -> None:
    torch.set_num_threads(1)
    if setup.transport == "ray_rdt":
        join_ray()
    faults = setup.faults if setup.faults and setup.faults.rank == rank else None
    plan = load_trainer(setup.path, rank)
    source = RandomSource(plan.manifest, faults)
    live: list[Producer] = []

    def start(_: Any) -> Any:
        live.append(
            Producer(
                plan,
                source,
                setup.transport,
                authkey=setup.authkey,
                stall_timeout_s=setup.stall_timeout_s,
            )
        )
        return live[0].address

    def sync(number: int) -> Any:
        source.sync, source.gathered = number, 0
        return live[0].sync(number)

    serve_commands(pipe, {"start": start, "sync": sync})
    for producer in live:
        producer.close()


def consumer_main(pipe: Connection, setup: Setup, consumer: int) -> None:
    torch.set_num_threads(1)
    plan = load_worker(setup.path, consumer)
    program = plan.consumer.program
    model = destination_model(program.parameters)
    poison(model, 0x5A)
    live: list[Consumer] = []
    hooks = BrokenHooks() if setup.faults and setup.faults.kind == "hook" else None

    def start(addresses: Any) -> None:
        live.append(
            Consumer(
                plan,
                Destination(model, program),
                setup.transport,
                addresses,
                authkey=setup.authkey,
                hooks=hooks,
                stall_timeout_s=setup.stall_timeout_s,
            )
        )

    def check(sync: int) -> list[str]:
        wanted = expected_parameters(setup.scenario, setup.plan, consumer, sync)
        have = dict(model.named_parameters())
        return [n for n, t in wanted.items() if not torch.equal(_raw(t), _raw(have[n].data.reshape(-1)))]

    def fingerprint(_: Any) -> int:
        return hash(tuple(_raw(p.data.reshape(-1)).sum().item() for p in model.parameters()))

    def close(_: Any) -> None:
        while live:
            live.pop().close()

    handlers: dict[str, Callable[[Any], Any]] = {
        "start": start,
        "sync": lambda number: live[0].sync(number),
        "check": check,
        "fingerprint": fingerprint,
        "close": close,
    }
    serve_commands(pipe, handlers)
    close(None)


@frozen
class Fleet:
    """Running processes of one plan."""

    plan: FleetPlan
    authkey: bytes
    addresses: dict[int, Any]
    producers: list[Child]
    workers: list[Child]

    @property
    def everyone(self) -> list[Child]:
        return [*self.producers, *self.workers]

    def begin(self, sync: int) -> None:
        for child in self.everyone:
            child.tell("sync", sync)

    def sync(self, sync: int) -> dict[str, Any]:
        self.begin(sync)
        return collect(self.everyone, ANSWER_S)

    def wrong(self, sync: int) -> dict[str, list[str]]:
        """Names that differ after a sync, a worker."""
        for child in self.workers:
            child.tell("check", sync)
        return collect(self.workers, ANSWER_S)

    def answer(self, child: Child, timeout_s: float) -> tuple[str, Any]:
        """(status, value) of one process."""
        assert child.pipe.poll(timeout_s), f"{child.name} did not answer in {timeout_s} s"
        return child.pipe.recv()


def _context() -> Any:
    ctx = multiprocessing.get_context("forkserver")
    ctx.set_forkserver_preload(["tests.fleet", "torch.distributed.fsdp", "torch.distributed.tensor"])
    return ctx


@contextlib.contextmanager
def running(
    scenario: Scenario,
    directory: Path,
    transport: str,
    *,
    stall_timeout_s: float = 30.0,
    faults: Faults | None = None,
    connect: bool = True,
) -> Iterator[Fleet]:
    """Write the plan, start every process, connect, and clean up."""
    plan = make_plan(scenario)
    path = directory / "fleet.plan"
    write_plan(plan, path)
    setup = Setup(scenario, plan, str(path), transport, new_authkey(), stall_timeout_s, faults)
    mains: dict[str, Any] = {f"producer {r}": (producer_main, (setup, r)) for r in range(scenario.trainer_ranks)}
    for replica in range(scenario.topology.replicas):
        for position in positions(scenario.topology):
            cid = consumer_id(scenario.topology, replica, position)
            mains[f"worker {cid}"] = (consumer_main, (setup, cid))
    with children(_context(), mains, stop_timeout_s=5.0) as started:
        producers = [started[n] for n in mains if n.startswith("producer")]
        workers = [started[n] for n in mains if n.startswith("worker")]
        for child in producers:
            child.tell("start")
        answers = collect(producers, ANSWER_S)
        addresses = {rank: answers[c.name] for rank, c in enumerate(producers)}
        if connect:
            for child in workers:
                child.tell("start", addresses)
            collect(workers, ANSWER_S)
        yield Fleet(plan, setup.authkey, addresses, producers, workers)
