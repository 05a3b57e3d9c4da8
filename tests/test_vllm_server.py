"""Syncs into real vLLM server processes over HTTP, with vLLM's own client; answers are held to those of fresh servers.

Most tests start two servers, one that is synced back and forth and one that loads the other checkpoint itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import requests

from tests.ray_cluster import ray_cluster
from tests.vllm_server import (
    COMPILE_OPTION,
    ROOT,
    Server,
    compile_plan,
    cpu_testbed,
    make_source,
    server,
    write_checkpoint,
)
from tests.vllm_trainer import Order

pytestmark = pytest.mark.slow

TRANSPORTS = ("local", "nixl", "ray_rdt")


def sync_back_and_forth(name: str, directory: Path, *layout: str, repair: bool = False) -> None:
    """Five syncs over each transport, between the checkpoint that the server loaded and another one."""
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    from rdtexec.vllm.trainer import RdtExecTrainer, RdtExecTrainerInitInfo

    checkpoints = {seed: write_checkpoint(name, directory / seed, ord(seed)) for seed in "AB"}
    options = [COMPILE_OPTION.get(word, word) for word in layout]
    plan = compile_plan(checkpoints["A"], *options)
    environment = cpu_testbed(directory / "testbed") if "--enable-expert-parallel" in layout else {}
    layout += ("--weight-transfer-config", '{"backend": "rdtexec"}')
    source = make_source(checkpoints["A"])

    def connect(to: Server, transport: str, repair_reload: bool) -> Any:
        info = RdtExecTrainerInitInfo(rank=0, plan=plan, transport=transport, repair_reload=repair_reload)
        client = HTTPVLLMWeightSyncClient(to.url, timeout=240)
        return RdtExecTrainer.trainer_init(info, client=client, source=source)

    with server(checkpoints["B"], *layout, environment=environment) as fresh:
        expected = {"B": fresh.completions()}
        if repair:
            # Not on the server that is synced: with several workers, vLLM's executor leaves the replies of a failed
            # call in its queues, and hands them out as those of the next call (vllm-project/vllm#49972).
            with pytest.raises(requests.HTTPError):
                connect(fresh, "local", repair_reload=False)
            assert "RDT631" in fresh.log.read_text()
            assert fresh.completions() == expected["B"]
    with ray_cluster("trainer"), server(checkpoints["A"], *layout, environment=environment) as running:
        expected["A"] = running.completions()
        assert expected["A"] != expected["B"]
        for transport in TRANSPORTS:
            trainer = connect(running, transport, repair)
            try:
                for seed in "BABAB":
                    source.use(checkpoints[seed])
                    running.post("pause", mode="wait")
                    trainer.send_weights()
                    running.post("resume")
                    assert running.completions() == expected[seed], f"{transport}, checkpoint {seed}"
            finally:
                trainer.shutdown()


def run_trainer(directory: Path, order: Order, *servers: Server) -> None:
    """All ranks of a trainer, to the end; an error of any rank fails the test, with what the servers logged."""
    directory.mkdir()
    file = directory / "order.json"
    file.write_text(json.dumps(attrs.asdict(attrs.evolve(order, store=str(directory / "store")))))
    ranks = []
    for rank in range(order.world):
        with (directory / f"rank-{rank}.log").open("w") as log:
            command = [sys.executable, "-m", "tests.vllm_trainer", str(file), str(rank)]
            ranks.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT))
    try:
        codes = [process.wait(900) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    logs = "".join(f"--- rank {r}\n{(directory / f'rank-{r}.log').read_text()[-3000:]}" for r in range(order.world))
    logs += "".join(f"--- {s.url}\n{s.tail()}" for s in servers)
    assert codes == [0] * order.world, logs


@pytest.mark.timeout(3600)
def test_trainers_of_every_layout(tmp_path: Path) -> None:
    """One, two and four ranks; FSDP2, pipeline stages, and ranks that hold experts; into two expert-parallel workers.

    Every byte is proved by checksum on the way, every answer is that of a fresh server.
    """
    layout = ("--tensor-parallel-size", "2", "--enable-expert-parallel")
    environment = cpu_testbed(tmp_path / "testbed")
    checkpoints = {seed: write_checkpoint("Qwen3MoeForCausalLM", tmp_path / seed, ord(seed)) for seed in "AB"}
    options = (*layout, "--weight-transfer-config", '{"backend": "rdtexec"}')
    with server(checkpoints["B"], *options, environment=environment) as fresh:
        expected = {"B": fresh.completions()}
    with (
        ray_cluster("trainer") as address,
        server(checkpoints["A"], *options, environment=environment) as running,
    ):
        expected["A"] = running.completions()
        assert expected["A"] != expected["B"]
        # Ray's NIXL agents keep a core busy in every process that had one, so whatever needs Ray comes last.
        layouts = (("whole", 1), ("fsdp", 2), ("stages", 2), ("shards", 4), ("experts", 4), ("fsdp", 4))
        for transports in (("local", "nixl"), ("ray_rdt",)):
            for name, world in layouts:
                order = Order(
                    layout=name,
                    world=world,
                    store="",
                    urls=(running.url,),
                    transports=transports,
                    sequence="BABAB",
                    checkpoints={seed: str(path) for seed, path in checkpoints.items()},
                    expected=expected,
                    repair_reload=True,
                    ray=address,
                )
                run_trainer(tmp_path / f"{name}-{world}-{transports[0]}", order, running)


@pytest.mark.timeout(900)
def test_two_replicas(tmp_path: Path) -> None:
    """Two independent servers behind one client, fed by two FSDP2 ranks over every transport."""
    checkpoints = {seed: write_checkpoint("LlamaForCausalLM", tmp_path / seed, ord(seed)) for seed in "AB"}
    options = ("--weight-transfer-config", '{"backend": "rdtexec"}')
    with (
        ray_cluster("trainer") as address,
        server(checkpoints["B"], *options) as one,
        server(checkpoints["A"], *options) as two,
    ):
        expected = {"B": one.completions(), "A": two.completions()}
        assert expected["A"] != expected["B"]
        order = Order(
            layout="fsdp",
            world=2,
            store="",
            urls=(one.url, two.url),
            transports=TRANSPORTS,
            sequence="ABABA",
            checkpoints={seed: str(path) for seed, path in checkpoints.items()},
            expected=expected,
            repair_reload=False,
            ray=address,
        )
        run_trainer(tmp_path / "trainer", order, one, two)


@pytest.mark.timeout(900)
def test_a_dead_replica_is_left_out_and_rejoins(tmp_path: Path) -> None:
    """One of two servers dies in the run: the other is fed alone; a new one takes its place between two syncs."""
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    from rdtexec.vllm.clients import ReplicaClient
    from rdtexec.vllm.trainer import RdtExecTrainer, RdtExecTrainerInitInfo
    from rdtplan.errors import RdtError

    checkpoints = {seed: write_checkpoint("LlamaForCausalLM", tmp_path / seed, ord(seed)) for seed in "AB"}
    plan = compile_plan(checkpoints["A"], "--replicas", "2")
    options = ("--weight-transfer-config", '{"backend": "rdtexec"}')
    source = make_source(checkpoints["A"])
    with server(checkpoints["B"], *options) as kept:
        with server(checkpoints["A"], *options) as doomed:
            expected = {"B": kept.completions(), "A": doomed.completions()}
            clients = [HTTPVLLMWeightSyncClient(s.url, timeout=60) for s in (kept, doomed)]
            client = ReplicaClient(clients)
            info = RdtExecTrainerInitInfo(rank=0, plan=plan, transport="nixl", stall_timeout_s=60)
            trainer = RdtExecTrainer.trainer_init(info, client=client, source=source)
            trainer.send_weights()
            assert kept.completions() == doomed.completions() == expected["A"]
            doomed.kill()
        source.use(checkpoints["B"])
        with pytest.raises((RdtError, requests.ConnectionError)):
            trainer.send_weights()
        trainer.send_weights(live_consumer_ids=[0])
        assert kept.completions() == expected["B"]
        with server(checkpoints["B"], *options) as restarted:
            client.clients = (clients[0], HTTPVLLMWeightSyncClient(restarted.url, timeout=60))
            client.clients[1].init_weight_transfer_engine(trainer.init_payload(replica_rank=1))
            for seed in "AB":
                source.use(checkpoints[seed])
                trainer.send_weights()
                assert kept.completions() == restarted.completions() == expected[seed]
            trainer.shutdown()


@pytest.mark.timeout(900)
def test_llama(tmp_path: Path) -> None:
    """One worker."""
    sync_back_and_forth("LlamaForCausalLM", tmp_path)


@pytest.mark.timeout(900)
def test_llama_over_two_workers(tmp_path: Path) -> None:
    """Tensor parallelism: each worker receives its own shards."""
    sync_back_and_forth("LlamaForCausalLM", tmp_path, "--tensor-parallel-size", "2")


@pytest.mark.timeout(900)
def test_llama_over_two_data_parallel_workers(tmp_path: Path) -> None:
    """Two engines behind one server, which vLLM makes independent of each other: a dense model has nothing to share."""
    sync_back_and_forth("LlamaForCausalLM", tmp_path, "--data-parallel-size", "2")


@pytest.mark.timeout(900)
def test_experts_over_two_workers(tmp_path: Path) -> None:
    """Expert parallelism on the test bed; without `repair_reload` the init is refused and the server goes on."""
    layout = ("--tensor-parallel-size", "2", "--enable-expert-parallel")
    sync_back_and_forth("Qwen3MoeForCausalLM", tmp_path, *layout, repair=True)


@pytest.mark.timeout(900)
def test_deepseek_over_two_workers(tmp_path: Path) -> None:
    """The DeepSeek-V3 form, latent attention and shared experts, tensor and expert parallel."""
    layout = ("--tensor-parallel-size", "2", "--enable-expert-parallel")
    sync_back_and_forth("DeepseekV3ForCausalLM@mla", tmp_path, *layout, repair=True)


@pytest.mark.timeout(900)
def test_experts_over_two_data_parallel_workers(tmp_path: Path) -> None:
    """Data with expert parallelism: two engine processes behind one server, each with half of the experts."""
    layout = ("--data-parallel-size", "2", "--enable-expert-parallel")
    sync_back_and_forth("Qwen3MoeForCausalLM", tmp_path, *layout, repair=True)
