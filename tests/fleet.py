"""Real processes for runtime tests: trainer ranks and workers of a synthetic plan, without vLLM.

Weights are random bytes drawn from the sync's number, the same in every process. What a worker must hold is computed
element by element from the loaders' own writes (`tests/plans.py`), so neither canonical regions nor chunks nor packing
are trusted.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen

from rdtexec import consumer as consumer_module
from rdtexec import producer as producer_module
from rdtexec.consumer import Consumer
from rdtexec.demo.fleet import Child, children, collect, new_authkey
from rdtexec.demo.processes import poison, serve_commands
from rdtexec.destination import Destination
from rdtexec.plans import load_trainer, load_worker
from rdtexec.producer import Producer
from rdtexec.reports import Observer
from rdtplan.errors import TransferError
from rdtplan.ir.file import write_plan
from rdtplan.ir.manifest import Manifest
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.topology import consumer_id, positions
from rdtplan.ir.traces import Parameters
from tests.endings import Ending
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
        self.most_alive = 0
        """Most tensors given out before a gather that still lived when it began."""
        self._given: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def start(self) -> None:
        return None

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        kind = self.faults.kind if self.faults and self.faults.sync == self.sync else ""
        self.gathered += 1
        self.most_alive = max(self.most_alive, len(self._given))
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
            self._given.add(tensor)
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
class Strike:
    """The process raises `signal` against itself at one point of a sync: SIGKILL dies there, SIGSTOP freezes there.

    Consumer: `read`, a chunk was announced and no byte moved; `free`, bytes have landed and the group is not freed;
    `half free`, the first trainer rank was told that the first group is free, and no other was.
    Producer: `serve`, a chunk is packed and not announced; `free`, everything asked for was served, and the first
    signal that a group is free has come.
    """

    point: str
    signal: int = signal.SIGKILL

    def __call__(self) -> None:
        os.kill(os.getpid(), self.signal)


def strike_producer(producer: Producer, strike: Strike) -> None:
    if strike.point == "free":
        _before(producer._state, "free", strike)
    else:
        for transport in producer._transports.values():
            _after(transport, "serve", strike)


def strike_consumer(consumer: Consumer, strike: Strike) -> None:
    if strike.point == "free":
        _before(consumer_module._Sync, "_free", strike)
    elif strike.point == "half free":
        free = consumer_module._Sync._free

        def half(sync: Any, group: int) -> None:
            if group:
                free(sync, group)
            else:
                consumer._links[0].send("free", sync=sync._number, group=group)
                strike()

        consumer_module._Sync._free = half  # type: ignore[method-assign]
    else:
        for transport in consumer._transports.values():
            _before(transport, "begin_read", strike)


def _before(owner: Any, name: str, action: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def struck(*args: Any) -> Any:
        setattr(owner, name, original)
        action()
        return original(*args)

    setattr(owner, name, struck)


def _replace_once(owner: Any, name: str, replacement: Callable[..., None]) -> None:
    original = getattr(owner, name)

    def struck(*args: Any) -> None:
        setattr(owner, name, original)
        replacement(*args)

    setattr(owner, name, struck)


def _after(owner: Any, name: str, action: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def struck(*args: Any) -> Any:
        setattr(owner, name, original)
        found = original(*args)
        action()
        return found

    setattr(owner, name, struck)


def _hold_connections(_: Any) -> None:
    """When this process dies, its Unix sockets stay open for half a second more; everything else of it closes."""
    parent = os.getpid()
    if os.fork() != 0:
        return
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if not (stat.S_ISSOCK(os.fstat(number).st_mode) and _is_unix(number)):
                os.close(number)
    while os.getppid() == parent:
        time.sleep(0.001)
    time.sleep(0.5)
    os._exit(0)


def _is_unix(number: int) -> bool:
    sock = socket.socket(fileno=number)
    try:
        return sock.family == socket.AF_UNIX
    finally:
        sock.detach()


def _kill_and_wait(pid: int) -> None:
    """Returns when nothing of the process can be read any more."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # its parent may bury it meanwhile
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.001)


class Heard(logging.Handler):
    """Keeps what the runtime logs in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logging.getLogger("rdtexec").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def usage(_: Any = None) -> dict[str, int]:
    """What this process holds: resident bytes, descriptors, threads, and files in /dev/shm (of the whole machine)."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "rss": int(status["VmRSS"].split()[0]) << 10,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": int(status["Threads"]),
        "shm": len(os.listdir("/dev/shm")),
    }


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
    ray_address: str
    answer_s: float
    """How long a process may take to answer: a deadline of the tests, not of the product."""
    far: tuple[str, ...]
    """Processes that say they are on another node."""
    options: dict[str, Any]
    """More settings of producers and consumers, by role."""
    outside: list[str] = field(factory=list)
    """Processes that do not join the Ray cluster."""
    nodes: dict[str, str] = field(factory=dict)
    """The address of the Ray node that a process joins, where the cluster has several."""


def join_ray(setup: Setup, name: str) -> None:
    """Join the Ray cluster that the test has started, if there is one."""
    if setup.ray_address and name not in setup.outside:
        import ray

        from rdtexec.transport import ray_rdt

        ray_rdt.START_TIMEOUT_S = setup.answer_s / 2  # a small and busy machine starts actors slowly
        ray.init(
            address=setup.ray_address,
            namespace="fleet",
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address=setup.nodes.get(name),
        )


def _observer(role: str, number: int, identity: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a producer or consumer, with a directory for statistics made an observer."""
    options = dict(options)
    directory = options.pop("stats_dir", "")
    return options | {"observer": Observer(role, number, identity, directory=directory)}


def producer_main(pipe: Connection, setup: Setup, rank: int) -> None:
    torch.set_num_threads(1)
    join_ray(setup, f"producer {rank}")
    faults = setup.faults if setup.faults and setup.faults.rank == rank else None
    heard = Heard()
    live: list[Producer] = []
    sources: list[RandomSource] = []
    if f"producer {rank}" in setup.far:
        producer_module.node = lambda: "another node"  # type: ignore[assignment]

    def start(path: str | None) -> Any:
        plan = load_trainer(path or setup.path, rank)
        sources.append(RandomSource(plan.manifest, faults))
        live.append(
            Producer(
                plan,
                sources[0],
                setup.transport,
                authkey=setup.authkey,
                stall_timeout_s=setup.stall_timeout_s,
                **_observer("producer", rank, plan.identity, setup.options.get("producer", {})),
            )
        )
        return live[0].address

    def sync(argument: Any) -> Any:
        number, only, weights = argument
        sources[0].sync, sources[0].gathered = weights, 0
        return live[0].sync(number, only)

    def mend(_: Any) -> None:
        sources[0].faults = None

    def corrupt(_: Any) -> None:
        """From now on, one byte of the first chunk served is not what was packed."""
        for transport in live[0]._transports.values():
            _after(transport, "serve", lambda transport=transport: flip_served(transport))

    def kill_ring_actor(when: str) -> None:
        """Now, or when the next chunk has been packed and not announced."""
        import ray

        transport: Any = live[0]._transports["ray_rdt"]
        if when == "now":
            ray.kill(transport._actor)
        else:
            _after(transport, "serve", lambda: ray.kill(transport._actor))

    def linger(consumer: int) -> None:
        """Its connection, once replaced, takes to close until the next sync has begun."""
        link = live[0]._links[consumer]
        close = link.close

        def late() -> None:
            deadline = time.monotonic() + 30
            while not live[0]._state.running and time.monotonic() < deadline:
                time.sleep(0.001)
            close()

        link.close = late  # type: ignore[method-assign]

    handlers: dict[str, Callable[[Any], Any]] = {
        "start": start,
        "sync": sync,
        "mend": mend,
        "linger": linger,
        "most alive": lambda _: sources[0].most_alive,
        "strike": lambda strike: strike_producer(live[0], strike),
        "corrupt": corrupt,
        "hold connections": _hold_connections,
        "usage": usage,
        "log": lambda _: "\n".join(heard.messages),
        "kill ring actor": kill_ring_actor,
    }
    serve_commands(pipe, handlers)
    for producer in live:
        producer.close()


def flip_served(transport: Any) -> None:
    """Flip bits of everything that a producer shows to consumers; what the trainer holds stays right."""
    shown = [transport._arena.memory] if hasattr(transport, "_arena") else list(transport._rings._rings.values())
    for memory in shown:
        memory ^= 0x10


def consumer_main(pipe: Connection, setup: Setup, consumer: int) -> None:
    torch.set_num_threads(1)
    join_ray(setup, f"worker {consumer}")
    plan = load_worker(setup.path, consumer)
    program = plan.consumer.program
    model = destination_model(program.parameters)
    poison(model, 0x5A)
    heard = Heard()
    live: list[Consumer] = []
    broken = setup.faults is not None and setup.faults.kind == "hook"
    if f"worker {consumer}" in setup.far:
        consumer_module.node = lambda: "another node"  # type: ignore[assignment]

    def start(addresses: Any) -> Any:
        """Connect, for the first time or anew; where the receive pool lies."""
        nonlocal broken
        old = live.pop() if live else None
        live.append(
            Consumer(
                plan,
                Destination(model, program),
                setup.transport,
                addresses,
                authkey=setup.authkey,
                hooks=BrokenHooks() if broken else None,
                stall_timeout_s=setup.stall_timeout_s,
                pool=old.pool if old is not None else None,
                **_observer("consumer", consumer, plan.identity, setup.options.get("consumer", {})),
            )
        )
        if old is not None:
            old.close()
        return live[0]._pool.memory.data_ptr() if live[0]._pool is not None else None

    def mend(_: Any) -> None:
        nonlocal broken
        broken = False

    def break_nixl(step: str) -> None:
        """The next agent does not start, for want of a network; or it starts, and registering memory fails."""
        if step == "agent":
            os.environ["UCX_TLS"] = "rc_mlx5"
        else:
            import nixl._api

            def refuse(*_: Any, **__: Any) -> None:
                raise nixl._api.nixlBind.nixlBackendError("NIXL_ERR_BACKEND")

            _replace_once(nixl._api.nixl_agent, "register_memory", refuse)

    def check(sync: int) -> list[str]:
        wanted = expected_parameters(setup.scenario, setup.plan, consumer, sync)
        have = dict(model.named_parameters())
        return [n for n, t in wanted.items() if not torch.equal(_raw(t), _raw(have[n].data.reshape(-1)))]

    def kill_before_read(pid: int) -> None:
        """The next chunk that this worker reads is one of a process that is dead by then."""
        for transport in live[0]._transports.values():
            _before(transport, "begin_read", lambda: _kill_and_wait(pid))

    def break_after_read(_: Any) -> None:
        """Something fails just when a read has begun."""

        def fail() -> None:
            raise TransferError("this worker broke", code="RDT600")

        for transport in live[0]._transports.values():
            _after(transport, "begin_read", fail)

    def slow_copies(seconds: float) -> None:
        """Every copy out of a producer's memory begins late."""
        transport = live[0]._transports["local"]
        copies = transport.copies

        def late(pull: Any) -> Any:
            make = copies(pull)

            def wait_and_make() -> Any:
                time.sleep(seconds)
                return make()

            return wait_and_make

        transport.copies = late  # type: ignore[method-assign]

    def fingerprint(_: Any) -> int:
        return hash(tuple(_raw(p.data.reshape(-1)).sum().item() for p in model.parameters()))

    def close(_: Any) -> None:
        while live:
            live.pop().close()

    handlers: dict[str, Callable[[Any], Any]] = {
        "start": start,
        "sync": lambda number: live[0].sync(number),
        "check": check,
        "mend": mend,
        "break nixl": break_nixl,
        "heal nixl": lambda _: os.environ.pop("UCX_TLS", None),
        "fingerprint": fingerprint,
        "strike": lambda strike: strike_consumer(live[0], strike),
        "kill before read": kill_before_read,
        "slow copies": slow_copies,
        "break after read": break_after_read,
        "transports": lambda _: {rank: live[0].transport_of(rank) for rank in live[0]._uses},
        "usage": usage,
        "log": lambda _: "\n".join(heard.messages),
        "close": close,
    }
    serve_commands(pipe, handlers)
    close(None)


@frozen
class Fleet:
    """Running processes of one plan."""

    plan: FleetPlan
    setup: Setup
    addresses: dict[int, Any]
    producers: list[Child]
    workers: list[Child]
    started: dict[str, Child]
    """All that were ever started, to be stopped in the end."""

    @property
    def authkey(self) -> bytes:
        return self.setup.authkey

    @property
    def everyone(self) -> list[Child]:
        return [*self.producers, *self.workers]

    def begin(self, sync: int, live: Sequence[int] | None = None, weights: int | None = None) -> None:
        """Tell everybody who takes part to run a sync; `weights` are those of another sync than this one."""
        for child in self.producers:
            child.tell("sync", (sync, live, sync if weights is None else weights))
        for cid in range(len(self.workers)) if live is None else live:
            self.workers[cid].tell("sync", sync)

    def sync(self, sync: int, live: Sequence[int] | None = None, weights: int | None = None) -> dict[str, Any]:
        self.begin(sync, live, weights)
        taking_part = self.workers if live is None else [self.workers[c] for c in live]
        return collect([*self.producers, *taking_part], self.setup.answer_s)

    def ask(self, of: Sequence[Child], command: str, argument: Any = None) -> list[Any]:
        """The same command to several; their answers in order."""
        for child in of:
            child.tell(command, argument)
        answers = collect(list(of), self.setup.answer_s)
        return [answers[child.name] for child in of]

    def connect(self, *cids: int) -> list[Any]:
        """Connect these workers, all unless given; those that were connected do it anew, with the pool they have."""
        return self.ask([self.workers[c] for c in cids] if cids else self.workers, "start", self.addresses)

    def wrong(self, sync: int, live: Sequence[int] | None = None) -> dict[str, list[str]]:
        """Names that differ after a sync, a worker; workers without differences are left out."""
        taking_part = self.workers if live is None else [self.workers[c] for c in live]
        found = self.ask(taking_part, "check", sync)
        return {child.name: names for child, names in zip(taking_part, found, strict=True) if names}

    def answer(self, child: Child, timeout_s: float) -> tuple[str, Any]:
        """(status, value) of one process."""
        assert child.pipe.poll(timeout_s), f"{child.name} did not answer in {timeout_s} s"
        return child.pipe.recv()

    def endings(self, of: Sequence[Child], since: float | None = None) -> dict[str, Ending]:
        """How the command under way ends in each process; fails when one is silent for `answer_s`."""
        began = time.monotonic() if since is None else since
        deadline = time.monotonic() + self.setup.answer_s
        pending = {child.pipe: child.name for child in of}
        found: dict[str, Ending] = {}
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            assert ready, f"{sorted(pending.values())} did not end within {self.setup.answer_s} s"
            for pipe in ready:
                name = pending.pop(pipe)  # type: ignore[call-overload]
                try:
                    status, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    status, value = "dead", None
                found[name] = Ending(status, value, time.monotonic() - began)
        return found

    def restart_worker(self, cid: int) -> None:
        """A new process takes the place of a worker, not connected yet."""
        self.workers[cid] = self._restart(self.workers[cid], consumer_main, cid)

    def restart_producer(self, rank: int) -> None:
        """A new process takes the place of a trainer rank, at a new address."""
        self.producers[rank] = self._restart(self.producers[rank], producer_main, rank)
        self.addresses[rank] = self.ask([self.producers[rank]], "start")[0]

    def _restart(self, old: Child, main: Callable[..., None], number: int) -> Child:
        old.process.kill()
        old.process.join(self.setup.answer_s)
        ours, theirs = _context().Pipe()
        process = _context().Process(target=main, args=(theirs, self.setup, number), name=old.name, daemon=True)
        process.start()
        theirs.close()
        child = Child(old.name, process, ours)
        self.started[f"{old.name}, {process.pid}"] = child
        return child


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
    ray_address: str = "",
    far: tuple[str, ...] = (),
    nodes: dict[str, str] | None = None,
    **options: dict[str, Any],
) -> Iterator[Fleet]:
    """Write the plan, start every process, connect, and clean up. `options` are settings by role."""
    answer_s = 300.0 if ray_address else ANSWER_S
    if ray_address:  # starting an actor and NIXL in every process takes long on a small machine
        options["consumer"] = {"connect_timeout_s": 240.0} | options.get("consumer", {})
    plan = make_plan(scenario)
    path = directory / "fleet.plan"
    write_plan(plan, path)
    setup = Setup(
        scenario,
        plan,
        str(path),
        transport,
        new_authkey(),
        stall_timeout_s,
        faults,
        ray_address,
        answer_s,
        far,
        dict(options),
        nodes=nodes or {},
    )
    mains: dict[str, Any] = {f"producer {r}": (producer_main, (setup, r)) for r in range(scenario.trainer_ranks)}
    for replica in range(scenario.topology.replicas):
        for position in positions(scenario.topology):
            cid = consumer_id(scenario.topology, replica, position)
            mains[f"worker {cid}"] = (consumer_main, (setup, cid))
    with children(_context(), mains, stop_timeout_s=5.0) as started:
        producers = [started[n] for n in mains if n.startswith("producer")]
        workers = [started[n] for n in mains if n.startswith("worker")]
        fleet = Fleet(plan, setup, {}, producers, workers, started)
        fleet.addresses.update(enumerate(fleet.ask(producers, "start")))
        if connect:
            fleet.connect()
        yield fleet
