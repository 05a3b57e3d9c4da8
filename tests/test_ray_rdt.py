"""Transport `ray_rdt` in one small Ray cluster: every byte, re-init, checksums, and the faults that only Ray has."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet import Strike, running
from tests.ray_cluster import another_node, kill_node, ray_cluster
from tests.test_faults import ALONE, FLEET, Note, failed, recover

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with ray_cluster() as address:
        yield address


def test_every_parameter_is_byte_exact_and_the_pool_is_kept(cluster: str, tmp_path: Path) -> None:
    """Two ranks, two workers; syncs, a sync of one alone, a re-init that keeps the memory, and syncs again."""
    with running(FLEET, tmp_path, "ray_rdt", ray_address=cluster, stall_timeout_s=120.0) as fleet:
        assert fleet.ask(fleet.workers, "transports") == [{0: "ray_rdt"}, {1: "ray_rdt"}]
        for sync, live in enumerate((None, None, [1], None)):
            fleet.sync(sync, live)
            assert fleet.wrong(sync, live) == {}
        pools = fleet.connect()
        fleet.sync(4)
        assert fleet.wrong(4) == {}
        assert fleet.connect() == pools
        fleet.sync(5)
        assert fleet.wrong(5) == {}


@pytest.mark.parametrize("when", ["now", pytest.param("at the next chunk", marks=pytest.mark.slow)])
def test_a_ring_actor_that_is_killed(when: str, cluster: str, tmp_path: Path, note: Note) -> None:
    """The sync that meets it fails by name, and a new actor serves the next."""
    with running(ALONE, tmp_path, "ray_rdt", ray_address=cluster, stall_timeout_s=120.0) as fleet:
        fleet.sync(0)
        fleet.ask(fleet.producers, "kill ring actor", when)
        if when == "now":
            time.sleep(1.0)
        fleet.begin(1)
        endings = fleet.endings(fleet.everyone)
        failed(endings, "producer 0")
        failed(endings, "Ray could not get chunk")
        fault = "between syncs" if when == "now" else "mid-sync"
        note(f"the ring actor of a producer is killed, {fault}", "ray_rdt", endings, "all connect anew: a new actor")
        recover(fleet, 2)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["read", "free"])
def test_a_killed_consumer(point: str, cluster: str, tmp_path: Path, note: Note) -> None:
    """As over the other transports: named, the survivor alone, the rejoin."""
    with running(ALONE, tmp_path, "ray_rdt", ray_address=cluster, stall_timeout_s=120.0) as fleet:
        fleet.sync(0)
        fleet.ask([fleet.workers[1]], "strike", Strike(point))
        fleet.begin(1)
        endings = fleet.endings(fleet.everyone)
        assert endings.pop("worker 1").status == "dead"
        failed(endings, "consumer 1 is gone")
        fault = "mid-pull" if point == "read" else "between pull and free"
        note(f"a consumer is killed, {fault}", "ray_rdt", endings, "a sync without it; a new process rejoins")
        fleet.connect(0)
        fleet.sync(2, live=[0])
        assert fleet.wrong(2, [0]) == {}
        fleet.restart_worker(1)
        fleet.connect(1)
        fleet.sync(3)
        assert fleet.wrong(3) == {}


@pytest.mark.slow
def test_a_killed_producer(cluster: str, tmp_path: Path, note: Note) -> None:
    """Its ring actor may outlive it for a moment; the new process brings its own."""
    with running(ALONE, tmp_path, "ray_rdt", ray_address=cluster, stall_timeout_s=120.0) as fleet:
        fleet.sync(0)
        fleet.ask(fleet.producers, "strike", Strike("serve"))
        fleet.begin(1)
        endings = fleet.endings(fleet.everyone)
        assert endings.pop("producer 0").status == "dead"
        failed(endings, "producer 0 is gone")
        note("a producer is killed, between pack and ready", "ray_rdt", endings, "a new process, and an init anew")
        fleet.restart_producer(0)
        recover(fleet, 2)


@pytest.mark.slow
def test_bytes_that_change_on_the_way_are_found(cluster: str, tmp_path: Path, note: Note) -> None:
    """Checksums end to end; the next sync is right."""
    checks = {"checksums": "full"}
    options = {"producer": checks, "consumer": checks}
    with running(ALONE, tmp_path, "ray_rdt", ray_address=cluster, stall_timeout_s=120.0, **options) as fleet:
        reports = fleet.sync(0)
        assert reports["worker 0"].checked == reports["worker 0"].pulls
        fleet.ask(fleet.producers, "corrupt")
        fleet.begin(1)
        endings = fleet.endings(fleet.everyone)
        failed(endings, "arrived with other bytes than producer 0 holds")
        note("a byte changes on the way (checksums on)", "ray_rdt", endings, "all connect anew")
        recover(fleet, 2)


def wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, f"process {pid} did not stop"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_node_that_dies(cluster: str, tmp_path: Path, note: Note) -> None:
    """The trainer's rank and its ring actor are on a node of their own: both are gone, and another node takes over."""
    here = {"producer 0": "127.0.0.2"}
    with another_node(cluster, "127.0.0.2") as node:
        with running(ALONE, tmp_path, "ray_rdt", ray_address=cluster, nodes=here, stall_timeout_s=120.0) as fleet:
            fleet.sync(0)
            assert fleet.wrong(0) == {}
            fleet.ask(fleet.producers, "strike", Strike("serve", signal.SIGSTOP))
            fleet.begin(1)
            wait_until_stopped(fleet.producers[0].process.pid)  # in the middle of the sync, for sure
            kill_node(node)
            fleet.producers[0].process.kill()
            endings = fleet.endings(fleet.everyone)
            assert endings.pop("producer 0").status == "dead"
            failed(endings, "producer 0 is gone")
            note("the Ray node of a producer dies, mid-sync", "ray_rdt", endings, "another node, and an init anew")
            fleet.setup.nodes["producer 0"] = "127.0.0.3"
            with another_node(cluster, "127.0.0.3"):
                fleet.restart_producer(0)
                recover(fleet, 2)


@pytest.mark.slow
def test_a_process_outside_of_ray(cluster: str, tmp_path: Path, note: Note) -> None:
    """A trainer must be in a cluster, and is told so; a worker that is in none joins the trainer's."""
    with running(ALONE, tmp_path, "ray_rdt", ray_address=cluster, connect=False, stall_timeout_s=120.0) as fleet:
        fleet.setup.outside.extend(["producer 0", "worker 1"])
        fleet.restart_worker(1)
        recover(fleet, 0)
        began = time.monotonic()
        with pytest.raises(Exception, match=r"RDT617.*this trainer process is in no Ray cluster"):
            fleet.restart_producer(0)
        assert time.monotonic() - began < 60
