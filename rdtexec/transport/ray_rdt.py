"""`ray_rdt`: packed chunks over Ray Direct Transport, for fleets whose processes already live in one Ray cluster.

A producer packs into serve rings as `nixl` does, but the rings lie in memory that it shares with an actor of its own on
the same node, which has registered it: host memory of the producer, or, where the trainer computes on a GPU, memory
that the actor allocated there (UCX hands out only what a process allocated itself, and takes TCP for the rest).
Consumers make one object ref a chunk, the first time they read it, and get it again every sync: Ray then reads the
ring's memory as it is, without a call to the actor. The barrier that this needs, a chunk is read only after it was
packed for this sync, is the producer's ready message.

Traps, all of them seen: a handle from `ray.get_actor` does not know that its methods move tensors; Ray keeps targets by
weak reference and lands elsewhere when one is gone, so the landing address is checked; a restarted actor keeps its id
and then refuses reads, so an actor is never restarted but replaced.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import uuid
from concurrent.futures import Future
from typing import Any, ClassVar

import torch

from rdtexec.cuda_ipc import MappedMemory, SharedMemory
from rdtexec.destination import Destination
from rdtexec.device import with_index
from rdtexec.plans import TrainerPlan, WorkerPlan
from rdtexec.pool import ReceivePool
from rdtexec.schedule import Pull
from rdtexec.transport.base import ReadFailed
from rdtexec.transport.packed import PackedConsumer, RingProducer, ServeRings
from rdtplan.errors import TransferError

START_TIMEOUT_S = 60.0
_POISONED: list[Any] = []
"""Memory that a read under way may still write to; kept on purpose until the process ends."""


def _ray() -> Any:
    try:
        import ray
        import ray.experimental
    except ImportError as error:
        raise TransferError(
            f"transport ray_rdt needs Ray: {error}", fix="pip install 'rdtplan[ray,nixl]'", code="RDT617"
        ) from None
    if not hasattr(ray.experimental, "set_target_for_ref"):
        raise TransferError(
            f"transport ray_rdt needs Ray 2.56 or later, this is {ray.__version__}", fix="upgrade ray", code="RDT617"
        )
    return ray


def _map(pid: int, descriptor: int, nbytes: int) -> torch.Tensor:
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(opened, nbytes), dtype=torch.uint8)
    finally:
        os.close(opened)


def _same_gpus() -> dict[str, str]:
    """Environment in which an actor that asks Ray for no GPU sees those of this process, by the same numbers."""
    visible = {name: value for name, value in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"}
    return {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", **visible}


class RingServer:
    """The actor: it holds a producer's rings and lets Ray read them. It decides nothing and copies nothing."""

    def __init__(self) -> None:
        self._rings: list[torch.Tensor] = []

    def add(self, pid: int, descriptor: int, nbytes: int) -> int:
        """Map and register a ring in host memory; its index."""
        return self._register(_map(pid, descriptor, nbytes))

    def add_on_gpu(self, ordinal: int, nbytes: int) -> tuple[int, dict[str, Any]]:
        """Allocate and register a ring on a GPU; its index, and what the producer needs to map it."""
        shared = SharedMemory(nbytes, torch.device("cuda", ordinal))
        return self._register(shared.memory), shared.facts

    def _register(self, memory: torch.Tensor) -> int:
        from ray.experimental import register_nixl_memory

        register_nixl_memory(memory)
        self._rings.append(memory)
        return len(self._rings) - 1

    def read(self, ring: int, at: int, nbytes: int) -> torch.Tensor:
        """A view of a ring; what it holds is read when the ref is got."""
        return self._rings[ring][at : at + nbytes]


class RayProducer(RingProducer):
    """Serve rings that are shared with an actor, through which Ray reads them."""

    name: ClassVar[str] = "ray_rdt"

    def __init__(self, device: torch.device) -> None:
        """Chunks are packed into memory of `device`."""
        self._device = with_index(device)

    def attach(self, plan: TrainerPlan, sharers: dict[int, tuple[int, ...]]) -> None:
        ray = _ray()
        if not ray.is_initialized():
            raise TransferError(
                "transport ray_rdt: this trainer process is in no Ray cluster",
                fix="call ray.init(address=...) before trainer_init, or use another transport",
                code="RDT617",
            )
        self._rank = plan.producer.rank
        self._plan, self._sharers = plan, sharers
        self._start_actor()

    def _start_actor(self) -> None:
        ray = _ray()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        context = ray.get_runtime_context()
        self._namespace = context.namespace
        self._actor_name = f"rdtexec-{self._plan.identity[:8]}-{self._rank}-{uuid.uuid4().hex[:8]}"
        self._descriptors: list[int] = []
        self._mapped: list[MappedMemory] = []
        self._ring_of: dict[int, int] = {}
        self._rings = ServeRings(self._plan, self._sharers, self._allocate)
        self._actor = (
            ray.remote(num_cpus=0, max_restarts=0, enable_tensor_transport=True)(RingServer)
            .options(
                name=self._actor_name,
                scheduling_strategy=NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False),
                runtime_env={"env_vars": _same_gpus()} if self._device.type == "cuda" else None,
            )
            .remote()
        )

    def _allocate(self, nbytes: int) -> torch.Tensor:
        try:
            if self._device.type == "cuda":
                added = self._actor.add_on_gpu.remote(self._device.index, nbytes)
                index, facts = _ray().get(added, timeout=START_TIMEOUT_S)
                self._mapped.append(MappedMemory(facts, self._device))
                memory = self._mapped[-1].memory
            else:
                index, memory = self._allocate_on_host(nbytes)
        except (OSError, ValueError, RuntimeError, _ray().exceptions.RayError) as error:
            raise TransferError(
                f"producer {self._rank}: its ring actor {self._actor_name} cannot serve {nbytes:,} bytes on "
                f"{self._device}: {str(error).splitlines()[0]}",
                fix="look at that actor's log; it must run on this node, see the GPUs of this process, and have NIXL",
                code="RDT617",
            ) from None
        self._ring_of[memory.data_ptr()] = index
        return memory

    def _allocate_on_host(self, nbytes: int) -> tuple[int, torch.Tensor]:
        descriptor = os.memfd_create(f"rdtexec-ring-{self._rank}")
        self._descriptors.append(descriptor)
        os.ftruncate(descriptor, nbytes)
        memory = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
        added = self._actor.add.remote(os.getpid(), descriptor, nbytes)
        return _ray().get(added, timeout=START_TIMEOUT_S), memory

    def welcome(self, consumer: int) -> dict[str, Any]:
        ray = _ray()
        if self._dead():
            self.close()
            self._start_actor()
        memory, slot_nbytes = self._rings.ring(consumer)
        return {
            "actor": self._actor_name,
            "namespace": self._namespace,
            "cluster": ray.get_runtime_context().gcs_address,
            "ring": self._ring_of[memory.data_ptr()],
            "slot_nbytes": slot_nbytes,
        }

    def _dead(self) -> bool:
        ray = _ray()
        try:
            ray.get(self._actor.__ray_ready__.remote(), timeout=START_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:  # slow is not dead: another one would be as slow
            raise TransferError(
                f"producer {self._rank}: its ring actor {self._actor_name} was silent for {START_TIMEOUT_S:.0f} s",
                fix="look at that actor's log, and whether this node is overloaded",
                code="RDT617",
            ) from None
        except ray.exceptions.RayError:
            return True
        return False

    def close(self) -> None:
        self._rings.close()
        if _ray().is_initialized():
            _ray().kill(self._actor)
        for descriptor in self._descriptors:
            os.close(descriptor)
        for mapped in self._mapped:
            mapped.close()
        self._descriptors, self._mapped = [], []


class RayConsumer(PackedConsumer):
    """Gets chunks by ref into the receive pool.

    `ray.get` blocks, so every receive slot has a thread for it. They are daemons: a get that hangs for ever must not
    keep the process alive.
    """

    name: ClassVar[str] = "ray_rdt"

    def attach(self, plan: WorkerPlan, destination: Destination, pool: ReceivePool | None) -> None:
        super().attach(plan, destination, pool)
        self._producers: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._refs: dict[int, Any] = {}
        self._reads: dict[Pull, tuple[int, Future[None]]] = {}
        self._registered = False
        self._jobs: queue.SimpleQueue[tuple[Future[None], int, int, int, torch.Tensor] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._read_loop, name="rdtexec-ray-get", daemon=True)
            for lane in self._pool.slots
            for _ in lane
        ]
        for thread in self._threads:
            thread.start()

    def connect(self, producer: int, welcome: dict[str, Any]) -> None:
        ray = _ray()
        try:
            if not ray.is_initialized():
                ray.init(address=welcome["cluster"], namespace=welcome["namespace"], log_to_driver=False)
            if not self._registered:
                ray.experimental.register_nixl_memory(self._pool.memory)
                self._registered = True
            actor = ray.get_actor(welcome["actor"], namespace=welcome["namespace"])
        except Exception as error:
            raise TransferError(
                f"consumer {self._plan.consumer.consumer_id} does not reach the ring actor {welcome['actor']} of "
                f"producer {producer} in the Ray cluster at {welcome['cluster']}: {str(error).splitlines()[0]}",
                fix="worker and trainer must be in one Ray cluster, with NIXL installed",
                code="RDT617",
            ) from None
        actor._ray_enable_tensor_transport = True
        self._producers[producer] = (actor, welcome)

    def begin_read(self, pull: Pull, producer: int, ready: dict[str, Any]) -> None:
        target = self.slot(pull)
        _, facts = self._producers[producer]
        if target.numel() > facts["slot_nbytes"]:
            raise TransferError(
                f"{self._plan.chunk_label(pull.chunk)} does not fit the serve slot of producer {producer}: "
                f"{facts['slot_nbytes']:,} bytes",
                fix="both ends must run the same plan",
                code="RDT603",
            )
        future: Future[None] = Future()
        self._reads[pull] = (producer, future)
        self._jobs.put((future, pull.chunk, producer, int(ready["slot"]), target))

    def _read_loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, chunk, producer, slot, target = job
            try:
                self._read(chunk, producer, slot, target)
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

    def _read(self, chunk: int, producer: int, slot: int, target: torch.Tensor) -> None:
        ray = _ray()
        ref = self._refs.get(chunk)
        if ref is None:
            actor, facts = self._producers[producer]
            at = slot * facts["slot_nbytes"]
            read = actor.read.options(tensor_transport="nixl")
            ref = self._refs[chunk] = read.remote(facts["ring"], at, target.numel())
        ray.experimental.set_target_for_ref(ref, [target])
        landed = ray.get(ref)
        if landed.data_ptr() != target.data_ptr():
            raise RuntimeError(f"Ray landed it at {landed.data_ptr():#x} and not at {target.data_ptr():#x}")

    def poll(self) -> list[Pull]:
        landed = [pull for pull, (_, future) in self._reads.items() if future.done()]
        for pull in landed:
            producer, future = self._reads.pop(pull)
            error = future.exception()
            if error is not None:
                raise ReadFailed.of(
                    producer,
                    f"Ray could not get {self._plan.chunk_label(pull.chunk)} from producer {producer}: "
                    f"{type(error).__name__}: {str(error).splitlines()[0]}",
                    fix="look whether that producer and its ring actor still run",
                ) from error
        return landed

    @property
    def inflight(self) -> int:
        return len(self._reads)

    def close(self, *, poisoned: bool) -> None:
        if poisoned or self._reads:
            _POISONED.append((self._pool.memory, self._reads))
        elif self._registered:
            self._registered = False
            _ray().experimental.deregister_nixl_memory(self._pool.memory)
        for _ in self._threads:
            self._jobs.put(None)
        self._refs.clear()
        self._copies.clear()
        self._producers.clear()
