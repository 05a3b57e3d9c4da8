"""Transfers between GPUs: every byte over every transport, streams and events, and the kernel against torch.

Needs a CUDA device (`-m gpu`); tests between devices need two.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attrs import evolve

from rdtexec import payload
from rdtexec.cuda_copy import CudaTable, addressable
from rdtexec.cuda_ipc import MappedMemory, SharedMemory
from rdtexec.device import host_pages, page_lock_memory
from rdtexec.moves import Move, make_move
from rdtplan.ir.topology import InferenceTopology, TransferSettings
from tests.gpu_fleet import Devices, running
from tests.plans import Scenario, Sizes
from tests.ray_cluster import ray_cluster

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device")]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")

LAYERS = Sizes(layers=4, dense_layers=1)
STREAMS = Scenario(
    LAYERS,
    InferenceTopology(tensor_parallel=2, expert_parallel=True),
    TransferSettings(stages_in_flight=2),
    trainer_ranks=2,
    ownership="pipeline",
    seed=1,
)
SMALL_CHUNKS = Scenario(
    LAYERS,
    InferenceTopology(pipeline_parallel=2),
    TransferSettings(num_rdt_buffers=1, gather_lookahead=0, max_chunk_bytes=256),
    trainer_ranks=2,
    ownership="experts",
    shuffled=True,
)
REPLICAS = Scenario(
    LAYERS,
    InferenceTopology(tensor_parallel=2, replicas=2),
    TransferSettings(num_rdt_buffers=3, stages_in_flight=3, gather_lookahead=2, max_chunk_bytes=1000),
    trainer_ranks=2,
    ownership="pipeline+experts",
    seed=2,
)
HOST = Devices(serve="cpu")
APART = Devices(worker="cuda:1")
CROSSED = Devices(trainer="cuda:1", serve="cuda:1", worker="cuda:0")


def staged(scenario: Scenario, where: str) -> Scenario:
    return evolve(scenario, settings=evolve(scenario.settings, staging_device=where))


CASES = {
    "local, streams": (STREAMS, "local", Devices()),
    "local, small chunks, no lookahead": (SMALL_CHUNKS, "local", Devices()),
    "local, replicas": (REPLICAS, "local", Devices()),
    "nixl, streams": (STREAMS, "nixl", Devices()),
    "nixl, small chunks, one slot": (SMALL_CHUNKS, "nixl", Devices()),
    "nixl, host staging": (staged(STREAMS, "host"), "nixl", HOST),
    "local, apart": pytest.param((STREAMS, "local", APART), marks=two_gpus),
    "local, crossed": pytest.param((REPLICAS, "local", CROSSED), marks=two_gpus),
    "nixl, apart": pytest.param((STREAMS, "nixl", APART), marks=two_gpus),
    "nixl, apart, each sees its own": pytest.param(
        (STREAMS, "nixl", Devices(trainer_sees="0", worker_sees="1")), marks=two_gpus
    ),
    "nixl, apart, host staging": pytest.param(
        (staged(REPLICAS, "host"), "nixl", evolve(HOST, worker="cuda:1")), marks=two_gpus
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_parameter_is_byte_exact(case: tuple[Scenario, str, Devices], tmp_path: Path) -> None:
    """Four syncs of late weights into modules whose memory moves: what stock loaders would have left."""
    with running(*case[:1], tmp_path, *case[1:]) as fleet:
        for sync in range(4):
            fleet.sync(sync)
            assert fleet.wrong(sync) == {}, sync


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    pytest.importorskip("ray")
    with ray_cluster() as address:
        yield address


RAY_CASES = {
    "streams": (STREAMS, Devices()),
    "small chunks, one slot": (SMALL_CHUNKS, Devices()),
    "host staging": (staged(STREAMS, "host"), HOST),
    "apart": pytest.param((REPLICAS, APART), marks=two_gpus),
    "crossed": pytest.param((STREAMS, CROSSED), marks=two_gpus),
}


@pytest.mark.parametrize("case", RAY_CASES.values(), ids=RAY_CASES)
def test_ray_direct_transport_is_byte_exact(case: tuple[Scenario, Devices], cluster: str, tmp_path: Path) -> None:
    """As over the other transports; every trainer rank's ring actor holds its rings where that rank serves from."""
    scenario, devices = case
    with running(scenario, tmp_path, "ray_rdt", devices, ray_address=cluster) as fleet:
        for sync in range(4):
            fleet.sync(sync)
            assert fleet.wrong(sync) == {}, sync


@pytest.mark.parametrize("transport", ["local", "nixl"])
def test_checksums_prove_every_chunk(transport: str, tmp_path: Path) -> None:
    """The digests of both ends agree, and count."""
    with running(STREAMS, tmp_path, transport, Devices(), checksums="full") as fleet:
        for sync in range(2):
            reports = fleet.sync(sync)
            for cid, child in enumerate(fleet.workers):
                assert reports[child.name].checked == len(fleet.plan.consumers[cid].program.chunks) > 0


AUTO = {
    "both on one GPU": (Devices(), "local"),
    "both on the CPU": (Devices("cpu", "cpu", "cpu"), "local"),
    "trainer on the CPU": (Devices(trainer="cpu", serve="cpu"), "nixl"),
    "worker on the CPU": (Devices(worker="cpu"), "nixl"),
    "on two GPUs": pytest.param((APART, "local"), marks=two_gpus),
}


@pytest.mark.parametrize("case", AUTO.values(), ids=AUTO)
def test_auto_is_local_where_the_memory_is_of_one_kind(case: tuple[Devices, str], tmp_path: Path) -> None:
    """The pair decides, and whatever it takes moves the right bytes."""
    devices, expected = case
    with running(STREAMS, tmp_path, "auto", devices) as fleet:
        for child in fleet.workers:
            child.tell("transports")
            assert fleet.answer(child, 20)[1] == [expected]
        for sync in range(2):
            fleet.sync(sync)
            assert fleet.wrong(sync) == {}


@two_gpus
def test_auto_falls_back_where_memory_cannot_be_mapped(tmp_path: Path) -> None:
    """Processes that see one GPU each: whichever transport it is, the bytes are right."""
    with running(STREAMS, tmp_path, "auto", Devices(trainer_sees="0", worker_sees="1")) as fleet:
        for sync in range(2):
            fleet.sync(sync)
            assert fleet.wrong(sync) == {}


# -- the kernel --------------------------------------------------------------------------------------------------------

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def test_the_kernel_copies_what_torch_copies() -> None:
    """Many random regions in one table: dimensions, strides, element sizes, offsets and bases of any alignment."""
    rng = random.Random(7)
    device = torch.device("cuda:0")
    for trial in range(30):
        nbytes = 1 << 21
        skew = rng.choice((0, 0, 1, 2, 4, 8))
        source = torch.randint(0, 256, (nbytes + 16,), dtype=torch.uint8, device=device)[skew:][:nbytes]
        dest = torch.zeros(nbytes + 16, dtype=torch.uint8, device=device)[skew:][:nbytes]
        expected = dest.clone()
        moves: list[Move] = []
        at = 0
        while at < nbytes - (1 << 19):
            itemsize = rng.choice((1, 2, 4, 8))
            shape, strides, spans = _region(rng)
            if max(spans) * itemsize > 1 << 18:
                continue
            at = -(-at // itemsize) * itemsize
            begin = rng.randrange(0, (nbytes - max(spans) * itemsize) // itemsize)
            move = make_move((0, 1), shape, *strides, begin, at // itemsize, itemsize)
            assert move is not None
            moves.append(move)
            if skew % itemsize:  # torch has no unaligned views
                a, b = source.clone().view(INTEGERS[itemsize]), expected.clone().view(INTEGERS[itemsize])
                b.as_strided(shape, strides[1], at // itemsize).copy_(a.as_strided(shape, strides[0], begin))
                expected = b.view(torch.uint8)
            else:
                a, b = source.view(INTEGERS[itemsize]), expected.view(INTEGERS[itemsize])
                b.as_strided(shape, strides[1], at // itemsize + b.storage_offset()).copy_(
                    a.as_strided(shape, strides[0], begin + a.storage_offset())
                )
            at += spans[1] * itemsize
        table = CudaTable(moves, device)
        for _ in range(2):
            dest.zero_()
            table.run([source.data_ptr(), dest.data_ptr()])
            assert torch.equal(dest, expected), (trial, skew, len(moves))


def _region(rng: random.Random) -> tuple[tuple[int, ...], list[tuple[int, ...]], list[int]]:
    shape = tuple(rng.choice((1, 2, 3, 7, 40)) for _ in range(rng.randrange(4)))
    shape += (rng.choice((1, 3, 16, 96, 100, 384, 1500, 20_000)),)
    if len(shape) == 4:
        shape = (*shape[:3], rng.choice((1, 3, 16, 96)))
    strides, spans = [], []
    step = rng.choice((1, 1, 1, 2)) if len(shape) < 4 else 1
    for _ in range(2):
        stride: list[int] = []
        at = step
        for n in reversed(shape):
            stride.insert(0, at)
            at = at * n + rng.choice((0, 0, 1, 8, 16))
        strides.append(tuple(stride))
        spans.append(1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)))
    return shape, strides, spans


def test_a_table_follows_its_bases() -> None:
    """New memory on either side needs no new table."""
    device = torch.device("cuda:0")
    move = make_move((0, 1), (300, 96), (256, 1), (96, 1), 128, 0, 2)
    assert move is not None
    table = CudaTable([move], device)
    for seed in range(4):
        source = torch.randn(301, 256, device=device, generator=torch.Generator(device).manual_seed(seed)).bfloat16()
        dest = torch.empty(300, 96, device=device, dtype=torch.bfloat16)
        table.run([source.data_ptr(), dest.data_ptr()])
        assert torch.equal(dest, source.view(-1)[128 : 128 + 300 * 256].view(300, 256)[:, :96])


def test_the_kernel_reads_and_writes_page_locked_host_memory() -> None:
    """For host staging: the GPU packs into, and scatters from, memory that cudaHostRegister has locked."""
    device = torch.device("cuda:0")
    nbytes = 3_000_001
    host = host_pages(nbytes)
    assert not addressable(host, device)
    page_lock_memory(host)
    assert addressable(host, device)
    move = make_move((0, 1), (nbytes,), (1,), (1,), 0, 0, 1)
    assert move is not None
    table = CudaTable([move], device)
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    back = torch.zeros_like(source)
    table.run([source.data_ptr(), host.data_ptr()])
    torch.cuda.synchronize()
    assert torch.equal(host, source.cpu())
    table.run([host.data_ptr(), back.data_ptr()])
    assert torch.equal(back, source)


def test_shared_memory_is_torch_memory() -> None:
    """An arena behaves like a tensor, also mapped in its own process, and gives its memory back."""
    device = torch.device("cuda:0")
    shared = SharedMemory(256 << 20, device)
    shared.memory.fill_(7)
    mapped = MappedMemory(shared.facts, device)
    assert int(mapped.memory[-1]) == 7 and mapped.memory.numel() == 256 << 20
    mapped.close()
    shared.close()
    quarter = torch.cuda.get_device_properties(device).total_memory // 4
    for _ in range(6):
        SharedMemory(quarter, device).close()
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        SharedMemory(quarter * 5, device)


@two_gpus
def test_memory_of_this_process_on_another_gpu_is_mapped() -> None:
    """A trainer and a worker in one process, a GPU each: the kernel reads over the link."""
    here, there = torch.device("cuda:0"), torch.device("cuda:1")
    shared = SharedMemory(1 << 20, there)
    shared.memory.copy_(torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device=there))
    torch.cuda.synchronize(there)
    mapped = MappedMemory(shared.facts, here)
    move = make_move((0, 1), (1 << 20,), (1,), (1,), 0, 0, 1)
    assert move is not None
    found = torch.zeros(1 << 20, dtype=torch.uint8, device=here)
    CudaTable([move], here).run([mapped.memory.data_ptr(), found.data_ptr()])
    assert torch.equal(found.cpu(), shared.memory.cpu())
    mapped.close()
    shared.close()


def test_the_payload_sample_sees_the_same_on_the_gpu() -> None:
    """Sampling by a table and by views agree, and one changed element among the sampled is seen."""
    full = {
        0: torch.randn(1000, 7).bfloat16(),
        1: torch.randn(5),
        2: torch.full((129,), float("nan"), dtype=torch.float64),
        3: torch.arange(100, dtype=torch.uint8),
    }
    for device in ("cpu", "cuda:0"):
        sample = payload.PayloadSample()
        tensors = {k: t.to(device) for k, t in full.items()}
        sample.add(0, tensors)
        sample.start()
        sample.add(0, tensors)
        assert sample.identical and sample.compared == 64 + 5 + 64 + 64, device
        sample.start()
        tensors[3][0] += 1
        sample.add(0, tensors)
        assert not sample.identical, device
