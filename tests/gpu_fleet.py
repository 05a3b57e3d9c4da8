"""Real processes for GPU tests: trainer ranks and workers of a synthetic plan, each with its tensors on a given device.

Weights, plans and expected parameters are those of `tests/fleet.py`; here they are gathered on a GPU, and late: a
tensor's values are written by work that is still queued on the caller's stream when the source yields it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from rdtexec.consumer import Consumer
from rdtexec.demo.fleet import children, collect, new_authkey
from rdtexec.demo.processes import serve_commands
from rdtexec.destination import Destination
from rdtexec.plans import load_trainer, load_worker
from rdtexec.producer import Producer
from rdtplan.ir.file import write_plan
from rdtplan.ir.manifest import Manifest
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.topology import consumer_id, positions
from tests.fleet import ANSWER_S, Fleet, _context, _raw, destination_model, expected_parameters, full_tensor
from tests.plans import Scenario, make_plan

LATE_CYCLES = 20_000_000
"""About 10 ms of GPU time between the yielding of a tensor and its values."""


@frozen
class Devices:
    """Where tensors are, and which GPUs the processes see ("" for all)."""

    trainer: str = "cuda:0"
    worker: str = "cuda:0"
    serve: str = "cuda:0"
    """Where the producer packs or shares."""
    trainer_sees: str = ""
    worker_sees: str = ""


@frozen
class Setup:
    """What every process of a fleet knows."""

    scenario: Scenario
    plan: FleetPlan
    path: str
    transport: str
    authkey: bytes
    devices: Devices
    checksums: str
    ray_address: str
    answer_s: float = ANSWER_S


class LateSource:
    """`full_tensor`s on a device, whose values come when the stream gets there; memory is poisoned until then."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self.manifest, self.device = manifest, device
        self.sync = 0

    def start(self) -> None:
        return None

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        for i, name in enumerate(names):
            values = full_tensor(self.manifest, self.manifest.names.index(name), self.sync)
            if stream is None:
                yield name, values
                continue
            tensor = torch.empty_like(values, device=self.device)
            tensor.view(-1).view(torch.uint8).fill_(0xA5)
            landed = values.pin_memory().to(self.device, non_blocking=True)
            if i == 0:
                torch.cuda._sleep(LATE_CYCLES)
            tensor.copy_(landed)
            yield name, tensor


class KernelTensors:
    """Hooks that do what a reload does: give every module new memory, and copy it to where it serves from at its end.

    The copy is slow to start, and the memory is given up at once: the next module's may lie at the same place.
    """

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._kernel = list(destination.tensors)
        destination.moving = True

    def _rows(self, module: int) -> list[int]:
        return [row for row, m in enumerate(self._destination.program.parameters.modules) if m == module]

    def materialize(self, module: int) -> None:
        for row in self._rows(module):
            fresh = torch.empty_like(self._kernel[row])
            fresh.view(-1).view(torch.uint8).fill_(0x3C)
            self._destination.tensors[row] = fresh

    def complete(self, module: int) -> None:
        torch.cuda._sleep(LATE_CYCLES // 10)
        for row in self._rows(module):
            fresh = self._destination.tensors[row]
            fresh.record_stream(torch.cuda.current_stream())
            self._kernel[row].copy_(fresh)
            self._destination.tensors[row] = self._kernel[row]


def _see(devices: str) -> None:
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices


def _join_ray(setup: Setup) -> None:
    if setup.ray_address:
        import ray

        ray.init(address=setup.ray_address, namespace="fleet", log_to_driver=False, configure_logging=False)


def producer_main(pipe: Connection, setup: Setup, rank: int) -> None:
    _see(setup.devices.trainer_sees)
    _join_ray(setup)
    torch.set_num_threads(1)
    plan = load_trainer(setup.path, rank)
    device = torch.device(setup.devices.trainer)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    source = LateSource(plan.manifest, device)
    live: list[Producer] = []

    def start(_: Any) -> Any:
        live.append(
            Producer(
                plan,
                source,
                setup.transport,
                authkey=setup.authkey,
                device=torch.device(setup.devices.serve),
                stall_timeout_s=40.0,
                checksums=setup.checksums,
            )
        )
        return live[0].address

    def sync(argument: tuple[int, Sequence[int] | None, int]) -> Any:
        number, only, source.sync = argument
        if device.type == "cpu":
            return live[0].sync(number, only)
        with torch.cuda.stream(torch.cuda.Stream(device)):  # another one in every sync
            return live[0].sync(number, only)

    serve_commands(pipe, {"start": start, "sync": sync})
    for producer in live:
        producer.close()


def consumer_main(pipe: Connection, setup: Setup, consumer: int) -> None:
    _see(setup.devices.worker_sees)
    _join_ray(setup)
    torch.set_num_threads(1)
    device = torch.device(setup.devices.worker)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    plan = load_worker(setup.path, consumer)
    program = plan.consumer.program
    model = destination_model(program.parameters).to(device)
    for parameter in model.parameters():
        parameter.data.view(-1).view(torch.uint8).fill_(0x5A)
    live: list[Consumer] = []

    def start(addresses: Any) -> None:
        destination = Destination(model, program)
        live.append(
            Consumer(
                plan,
                destination,
                setup.transport,
                addresses,
                authkey=setup.authkey,
                hooks=KernelTensors(destination) if device.type == "cuda" else None,
                stall_timeout_s=40.0,
                checksums=setup.checksums,
            )
        )

    def check(sync: int) -> list[str]:
        wanted = expected_parameters(setup.scenario, setup.plan, consumer, sync)
        have = dict(model.named_parameters())
        return [n for n, t in wanted.items() if not torch.equal(_raw(t), _raw(have[n].data.reshape(-1).cpu()))]

    def transports(_: Any) -> list[str]:
        return sorted({live[0].transport_of(rank) for rank in plan.consumer.routing.producer})

    handlers = {"start": start, "sync": lambda number: live[0].sync(number), "check": check, "transports": transports}
    serve_commands(pipe, handlers)
    for one in live:
        one.close()


@contextlib.contextmanager
def running(
    scenario: Scenario,
    directory: Path,
    transport: str,
    devices: Devices,
    *,
    checksums: str = "off",
    ray_address: str = "",
) -> Iterator[Fleet]:
    """Write the plan, start every process, connect, and clean up."""
    plan = make_plan(scenario)
    path = directory / "fleet.plan"
    write_plan(plan, path)
    setup = Setup(scenario, plan, str(path), transport, new_authkey(), devices, checksums, ray_address)
    mains: dict[str, Any] = {f"producer {r}": (producer_main, (setup, r)) for r in range(scenario.trainer_ranks)}
    for replica in range(scenario.topology.replicas):
        for position in positions(scenario.topology):
            cid = consumer_id(scenario.topology, replica, position)
            mains[f"worker {cid}"] = (consumer_main, (setup, cid))
    with children(_context(), mains, stop_timeout_s=20.0) as started:
        producers = [started[n] for n in mains if n.startswith("producer")]
        workers = [started[n] for n in mains if n.startswith("worker")]
        for child in producers:
            child.tell("start")
        answers = collect(producers, ANSWER_S)
        addresses = {rank: answers[c.name] for rank, c in enumerate(producers)}
        for child in workers:
            child.tell("start", addresses)
        collect(workers, ANSWER_S)
        yield Fleet(plan, setup, addresses, producers, workers, started)  # type: ignore[arg-type]
