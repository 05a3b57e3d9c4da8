"""The trainer's engine on two ranks of torch.distributed: what fails on one of them, or at its client, ends both.

The client drives consumers of its own process, as a vLLM server would.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rdtexec.consumer import Consumer
from rdtexec.demo.fleet import Child, children
from rdtexec.demo.processes import serve_commands
from rdtexec.destination import Destination
from rdtexec.live_compile import Standing, trace_for_fleet
from rdtexec.plans import load_worker
from rdtexec.sources import Source
from rdtexec.sources.base import ParamMeta
from rdtplan.errors import TransferError
from rdtplan.ir.file import write_plan
from rdtplan.ir.manifest import Manifest
from rdtplan.ir.topology import InferenceTopology
from tests.fleet import _context, _raw, destination_model, expected_parameters, full_tensor
from tests.plans import Scenario, Sizes, make_plan
from tests.test_live_compile import honest, standings

SCENARIO = Scenario(Sizes(layers=2, dense_layers=1), InferenceTopology(tensor_parallel=2), trainer_ranks=2)
STALL_S = 3.0
ANSWER_S = 120.0


class Weights(Source):
    """A rank whose weights are the random bytes of `step`; `without` is a name that it does not hold."""

    def __init__(self, manifest: Manifest, rank: int, without: str = "") -> None:
        entries = [
            ParamMeta(name, getattr(torch, manifest.dtype(k)), manifest.shape(k))
            for k, name in enumerate(manifest.names)
        ]
        super().__init__(entries, rank)
        self.manifest, self.without, self.step = manifest, without, 0

    def held_names(self) -> frozenset[str] | None:
        return frozenset(self.manifest.names) - {self.without} if self.without else None

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, full_tensor(self.manifest, self.manifest.names.index(name), self.step)


class Client:
    """A `VLLMWeightSyncClient` whose workers are here. A call whose name is in `silent` never returns.

    It knows, as vLLM does, whether an update is open: it begins none within another, and ends one that fails.
    """

    def __init__(self, path: str) -> None:
        self.plans = [load_worker(path, c) for c in range(SCENARIO.topology.workers)]
        self.models = [destination_model(plan.consumer.program.parameters) for plan in self.plans]
        self.consumers: list[Consumer] = []
        self.silent: set[str] = set()
        self.refuses = False
        self.open = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        if self.refuses:
            raise ConnectionError("the server refused")
        self.close()
        authkey = bytes.fromhex(init_info["authkey"])
        if "compile_at" in init_info:
            init_info = init_info | {"producers": self._trace(init_info["compile_at"], authkey)}
        self.init_info = {name: value for name, value in init_info.items() if name != "compile_at"}
        producers = {int(rank): address for rank, address in init_info["producers"].items()}
        for plan, model in zip(self.plans, self.models, strict=True):
            destination = Destination(model, plan.consumer.program)
            self.consumers.append(
                Consumer(plan, destination, "local", producers, authkey=authkey, stall_timeout_s=STALL_S)
            )

    def _trace(self, address: Any, authkey: bytes) -> dict[str, Any]:
        """What workers do without a plan file: hand in their traces; the addresses of the producers."""

        def one(standing: Standing) -> dict[str, Any]:
            patience = {"connect_timeout_s": ANSWER_S, "stall_timeout_s": ANSWER_S}
            return trace_for_fleet(address, standing, honest(SCENARIO, standing), authkey=authkey, **patience)

        with ThreadPoolExecutor(len(self.plans)) as threads:
            return next(iter(threads.map(one, standings(SCENARIO.topology))))

    def start_weight_update(self) -> None:
        if self.open:
            raise RuntimeError("an update is open already")
        self.open = True
        self._maybe("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._check_open()
        try:
            if update_info.get("abandon"):
                raise TransferError("this update was abandoned by the trainer", code="RDT632")
            self._maybe("update_weights")
            with ThreadPoolExecutor(len(self.consumers)) as threads:
                list(threads.map(lambda consumer: consumer.sync(update_info["sync_idx"]), self.consumers))
        except BaseException:
            self.open = False
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._check_open()
        self._maybe("finish_weight_update")
        self.open = False

    def _check_open(self) -> None:
        if not self.open:
            raise RuntimeError("no update is open")

    def _maybe(self, call: str) -> None:
        if call in self.silent:
            threading.Event().wait()

    def wrong(self, step: int) -> list[str]:
        """Parameters that are not what loaders would have made of the weights of a step."""
        found = []
        for c, model in enumerate(self.models):
            have = dict(model.named_parameters())
            wanted = expected_parameters(SCENARIO, make_plan(SCENARIO), c, step)
            found += [n for n, t in wanted.items() if not torch.equal(_raw(t), _raw(have[n].data.reshape(-1)))]
        return found

    def close(self) -> None:
        while self.consumers:
            self.consumers.pop().close()


class Replica:
    """An engine that notes what it is asked for."""

    def __init__(self, *, silent: bool) -> None:
        self.silent, self.asked = silent, []  # type: ignore[var-annotated]

    def start_weight_update(self) -> None:
        self.asked.append("start")
        if self.silent:
            threading.Event().wait()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.asked.append(f"update {update_info}")


def silent_replica(_: Any) -> tuple[str, list[list[str]]]:
    """The error when one of two engines does not answer, and what both were asked for."""
    from rdtexec.vllm.clients import ReplicaClient, call_within

    replicas = [Replica(silent=False), Replica(silent=True)]
    try:
        call_within(0.5, ReplicaClient(replicas), "start_weight_update")  # type: ignore[arg-type]
    except TransferError as error:
        return str(error), [replica.asked for replica in replicas]
    raise AssertionError


def rank_main(pipe: Connection, rank: int, path: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    from rdtexec.vllm.trainer import RdtExecTrainer, RdtExecTrainerInitInfo

    manifest = load_worker(path, 0).manifest
    client = Client(path)
    live: list[RdtExecTrainer] = []

    def init(settings: dict[str, Any]) -> None:
        settings = {"plan": path, "transport": "local", "stall_timeout_s": STALL_S} | settings
        source = Weights(manifest, rank, settings.pop("without", ""))
        client.refuses = settings.pop("refuses", False)
        given = settings.pop("source", source)
        live.append(
            RdtExecTrainer.trainer_init(RdtExecTrainerInitInfo(rank=rank, **settings), client=client, source=given)
        )

    def send(argument: tuple[int, list[int] | None, set[str]]) -> None:
        live[0].source.step, only, client.silent = argument
        live[0].send_weights(only)

    def left(_: Any) -> tuple[list[str], int]:
        """Threads of ours, once those that are ending have ended, and the number of descriptors."""
        deadline = time.monotonic() + STALL_S
        while (ours := [t.name for t in threading.enumerate() if t.name.startswith("rdtexec")]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.01)
        gc.collect()
        return ours, len(os.listdir("/proc/self/fd"))

    handlers: dict[str, Callable[[Any], Any]] = {
        "init": init,
        "left": left,
        "send": send,
        "reconnect": lambda _: client.init_weight_transfer_engine(client.init_info),
        "wrong": client.wrong,
        "silent replica": silent_replica,
        "hang up": lambda _: client.close(),
        "shutdown": lambda _: live.pop().shutdown(),
    }
    serve_commands(pipe, handlers)
    client.close()
    for trainer in live:
        trainer.shutdown()
    dist.destroy_process_group()


Ranks = list[Child]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks, for all tests: they import vLLM, and what fails must leave them as they were."""
    directory = tmp_path_factory.mktemp("trainer")
    path = str(directory / "fleet.plan")
    write_plan(make_plan(SCENARIO), path)
    mains: dict[str, Any] = {f"rank {r}": (rank_main, (r, path, str(directory / "store"))) for r in range(2)}
    with children(_context(), mains, stop_timeout_s=10.0) as started:
        yield list(started.values())


def both(ranks: Ranks, command: str, *arguments: Any) -> list[tuple[str, Any]]:
    """(status, value) of a command on both ranks, with an argument for each or one for both."""
    for child, argument in zip(ranks, arguments if len(arguments) == 2 else [*arguments, *arguments], strict=True):
        child.tell(command, argument)
    found = []
    for child in ranks:
        assert child.pipe.poll(ANSWER_S), f"{child.name} hangs"
        found.append(child.pipe.recv())
    return found


def ask(child: Child, command: str, argument: Any = None) -> Any:
    child.tell(command, argument)
    assert child.pipe.poll(ANSWER_S), f"{child.name} hangs"
    status, value = child.pipe.recv()
    assert status == "ok", value
    return value


@pytest.fixture
def trainers(ranks: Ranks) -> Iterator[Ranks]:
    assert both(ranks, "init", {}) == [("ok", None)] * 2
    yield ranks
    assert both(ranks, "shutdown", None) == [("ok", None)] * 2


def works(trainers: Ranks, step: int) -> None:
    """A sync over everything, after the workers have connected anew."""
    ask(trainers[0], "reconnect")
    assert both(trainers, "send", (step, None, set())) == [("ok", None)] * 2
    assert ask(trainers[0], "wrong", step) == []


# -- init --------------------------------------------------------------------------------------------------------------

NOWHERE = "/nonexistent/fleet.plan"
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no such plan": ({"plan": NOWHERE}, "RDT401"),
    "no plan on one rank alone": ({"plan": ""}, "RDT111"),
    "no source": ({"source": None}, "RDT111"),
    "wrong transport": ({"transport": "pigeon"}, "RDT111"),
    "a setting that is not the plan's": ({"gather_lookahead": 9}, "RDT111"),
    "statistics in a file": ({"stats_dir": "/dev/null"}, "RDT112"),
    "a weight that is not held": ({"without": "model.norm.weight"}, "RDT503"),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", BROKEN)
def test_an_init_that_fails_on_one_rank_fails_on_both(case: str, rank: int, ranks: Ranks) -> None:
    """With one error, which names the rank, and nothing is left on either."""
    settings, code = BROKEN[case]
    before = both(ranks, "left", None)
    answers = both(ranks, "init", *[settings if r == rank else {} for r in range(2)])
    for status, text in answers:
        assert status == "error" and text.startswith(code) and f"trainer rank {rank}" in text, answers
    assert both(ranks, "left", None) == before


def test_an_address_that_is_taken_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    with Listener(("127.0.0.1", 0)) as taken:
        before = both(ranks, "left", None)
        for status, text in both(ranks, "init", {}, {"address": taken.address}):
            assert status == "error" and text.startswith("RDT115: trainer rank 1: cannot listen at"), text
        assert both(ranks, "left", None) == before


def test_workers_that_refuse_fail_every_rank(ranks: Ranks) -> None:
    """Rank 0 alone speaks with them."""
    before = both(ranks, "left", None)
    for status, text in both(ranks, "init", {"refuses": True}):
        assert status == "error" and "trainer rank 0: ConnectionError: the server refused" in text, text
    assert both(ranks, "left", None) == before


def test_a_plan_that_is_compiled_at_init(ranks: Ranks) -> None:
    """Rank 0 hands it to the other; when that one cannot serve it, workers and both ranks end."""
    before = both(ranks, "left", None)
    with Listener(("127.0.0.1", 0)) as taken:
        for status, text in both(ranks, "init", {"plan": ""}, {"plan": "", "address": taken.address}):
            assert status == "error" and text.startswith("RDT115: trainer rank 1: cannot listen at"), text
    assert both(ranks, "init", {"plan": ""}) == [("ok", None)] * 2
    works(ranks, 1)
    assert both(ranks, "shutdown", None) == [("ok", None)] * 2
    ask(ranks[0], "hang up")
    assert both(ranks, "left", None) == before


def test_an_init_after_all_of_that_works(trainers: Ranks) -> None:
    works(trainers, 1)


# -- syncs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["start_weight_update", "update_weights", "finish_weight_update"])
def test_a_call_that_never_returns_is_named(call: str, trainers: Ranks) -> None:
    """On both ranks, and the next sync works."""
    works(trainers, 1)
    answers = both(trainers, "send", (2, None, {call}))
    assert all(status == "error" for status, _ in answers), answers
    if call != "update_weights":  # there the producers, to whom nobody comes, see it first
        assert answers[0][1].startswith(f"RDT602: {call} has not returned for"), answers
        assert f"{call} has not returned for" in answers[1][1], answers
    works(trainers, 3)


def test_a_replica_that_never_answers_is_named(ranks: Ranks) -> None:
    """The others, which have started, abandon the update."""
    error, asked = ask(ranks[0], "silent replica")
    assert error.startswith("RDT602: replica 1: TransferError: RDT602: start_weight_update has not returned for"), error
    assert asked == [["start", "update {'abandon': True}"], ["start"]]


def test_ranks_that_were_given_different_live_consumers(trainers: Ranks) -> None:
    """Said by all before an update has begun: the workers know nothing of it, and need not connect anew."""
    answers = both(trainers, "send", (1, None, set()), (1, [0], set()))
    for status, text in answers:
        assert status == "error" and "it was given live_consumer_ids [0], rank 0 None" in text, answers
    assert both(trainers, "send", (2, None, set())) == [("ok", None)] * 2
    assert ask(trainers[0], "wrong", 2) == []
