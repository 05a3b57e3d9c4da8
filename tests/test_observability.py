"""What a fleet says of itself: checksums, the alarm for identical payloads, JSON lines, metrics; and their faults."""

from __future__ import annotations

import json
import resource
import signal
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rdtexec.reports import Observer, ProducerReport
from rdtplan.errors import InputError
from rdtplan.ir.topology import InferenceTopology, TransferSettings
from tests.fleet import Faults, Fleet, running
from tests.plans import Scenario
from tests.test_faults import ALONE, FLEET, SMALL, TRANSPORTS, Note, failed, recover

SPLIT = Scenario(SMALL, InferenceTopology(tensor_parallel=2), TransferSettings(max_chunk_bytes=64), trainer_ranks=2)
"""More than sixteen chunks a worker, so that `sampled` leaves some out of every sync."""


def both(**options: Any) -> dict[str, dict[str, Any]]:
    return {"producer": options, "consumer": options}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_full_checksums_prove_every_chunk(transport: str, tmp_path: Path) -> None:
    """Every chunk of every sync is checked."""
    with running(SPLIT, tmp_path, transport, **both(checksums="full")) as fleet:
        for sync in range(2):
            reports = fleet.sync(sync)
            for child in fleet.workers:
                assert reports[child.name].checked == reports[child.name].pulls > 16
            assert fleet.wrong(sync) == {}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sampled_checksums_cover_all_chunks_in_sixteen_syncs(transport: str, tmp_path: Path) -> None:
    """Others every sync, and after sixteen each chunk once."""
    with running(SPLIT, tmp_path, transport, **both(checksums="sampled")) as fleet:
        checked = dict.fromkeys((c.name for c in fleet.workers), 0)
        for sync in range(16):
            reports = fleet.sync(sync)
            for name in checked:
                assert 0 < reports[name].checked < reports[name].pulls
                checked[name] += reports[name].checked
        assert all(checked[name] == reports[name].pulls for name in checked)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bytes_that_change_on_the_way_are_found(transport: str, tmp_path: Path, note: Note) -> None:
    """What a producer shows is not what its trainer holds: the worker names the chunk, and nobody succeeds."""
    with running(FLEET, tmp_path, transport, **both(checksums="full")) as fleet:
        fleet.sync(0)
        fleet.ask([fleet.producers[0]], "corrupt")
        fleet.begin(1)
        endings = fleet.endings(fleet.everyone)
        failed(endings, "arrived with other bytes than producer 0 holds: checksum")
        assert any("RDT623" in e.value for e in endings.values())
        note("a byte changes on the way (checksums on)", transport, endings, "all connect anew")
        recover(fleet, 2)


def test_without_checksums_changed_bytes_pass(tmp_path: Path) -> None:
    """The reason for the setting, and the proof that the test before this one corrupts what it means to."""
    with running(FLEET, tmp_path, "nixl") as fleet:
        fleet.ask([fleet.producers[0]], "corrupt")
        fleet.sync(0)
        assert fleet.wrong(0)


def test_a_trainer_without_checksums_is_noticed(tmp_path: Path) -> None:
    """A worker that wants proof of every chunk does not succeed without."""
    with running(ALONE, tmp_path, "local", consumer={"checksums": "full"}) as fleet:
        fleet.begin(0)
        failed(fleet.endings(fleet.everyone), "chunks were proved by checksum")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_identical_payload_is_said_or_refused_or_ignored(transport: str, tmp_path: Path, note: Note) -> None:
    """`fail` fails the sync everywhere; the retry, and any other after a failure, is no reason for an alarm."""
    faults = Faults("raise", rank=0, sync=3)
    with running(FLEET, tmp_path, transport, faults=faults, producer={"on_identical": "fail"}) as fleet:
        fleet.sync(0)
        fleet.begin(1, weights=0)
        endings = fleet.endings(fleet.everyone)
        failed(endings, "sent what the sync before sent: none of")
        assert any("RDT624" in e.value for e in endings.values())
        note("nothing was trained (on_identical=fail)", transport, endings, "the retry is not held to it")
        fleet.connect()
        fleet.sync(2, weights=0)
        assert fleet.wrong(0) == {}
        fleet.begin(3)  # the gather breaks after the first group was sent
        failed(fleet.endings(fleet.everyone), "the trainer's gather broke")
        fleet.ask(fleet.producers, "mend")
        fleet.connect()
        fleet.sync(4, weights=3)
        assert fleet.wrong(3) == {}
        fleet.begin(5, weights=3)
        failed(fleet.endings(fleet.everyone), "sent what the sync before sent")


@pytest.mark.parametrize("mode", ["warn", "ignore"])
def test_an_identical_payload_need_not_fail(mode: str, tmp_path: Path) -> None:
    """The report and, with `warn`, the log say it; changed weights are not reported."""
    with running(ALONE, tmp_path, "local", producer={"on_identical": mode}) as fleet:
        fleet.sync(0)
        assert fleet.sync(1, weights=0)["producer 0"].identical is (mode == "warn")
        assert fleet.sync(2)["producer 0"].identical is False
        assert fleet.wrong(2) == {}
        assert ("sent what the sync before sent" in fleet.ask(fleet.producers, "log")[0]) is (mode == "warn")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def statistics(fleet: Fleet, directory: Path) -> dict[str, list[dict[str, Any]]]:
    return {path.stem: lines(path) for path in sorted(directory.glob("*.jsonl"))}


def test_every_sync_is_a_line_of_json(tmp_path: Path) -> None:
    """Good and failed ones, of every process, with the plan's identity and the sync's number."""
    stats = tmp_path / "made" / "by it"
    with running(ALONE, tmp_path, "local", faults=Faults("short", 0, 1), **both(stats_dir=str(stats))) as fleet:
        fleet.sync(0)
        fleet.begin(1)
        fleet.endings(fleet.everyone)
        found = statistics(fleet, stats)
        assert sorted(found) == ["consumer-0", "consumer-1", "producer-0"]
        for of in found.values():
            assert [(row["sync"], row["ok"], row["plan"]) for row in of] == [
                (0, True, fleet.plan.identity),
                (1, False, fleet.plan.identity),
            ]
            assert of[0]["bytes"] > 0 and of[0]["seconds"] > 0 and of[0]["peak_memory"] > 0
            assert "the source ended before" in of[1]["error"]


def test_a_full_disk_fails_no_sync(tmp_path: Path) -> None:
    """Statistics that cannot be written are a warning."""
    for name in ("producer-0", "consumer-0", "consumer-1"):
        (tmp_path / f"{name}.jsonl").symlink_to("/dev/full")
    with running(ALONE, tmp_path, "local", **both(stats_dir=str(tmp_path))) as fleet:
        for sync in range(2):
            fleet.sync(sync)
            assert fleet.wrong(sync) == {}
        for said, name in zip(
            fleet.ask(fleet.everyone, "log"), ("producer-0", "consumer-0", "consumer-1"), strict=True
        ):
            assert said.count(f"statistics were not written to {tmp_path}/{name}.jsonl") == 2


REPORT = ProducerReport(7, 1, 2, 3, 0.5, 0.1, 0.1, 0.1, 0.1, 4096, False, 0)


def test_a_line_that_fits_only_in_part_is_taken_back(tmp_path: Path) -> None:
    """Half a line would spoil the next one too, once there is room again."""
    observer = Observer("producer", 0, "f" * 64, directory=str(tmp_path))
    path = tmp_path / "producer-0.jsonl"
    observer.succeeded(REPORT)
    whole = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 40, hard))
        observer.succeeded(REPORT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert path.stat().st_size == whole
    observer.failed(8, ValueError("x"))
    assert [row["sync"] for row in lines(path)] == [7, 8]


def test_statistics_that_cannot_be_written_are_refused_at_init(tmp_path: Path) -> None:
    """A file where the directory should be, a port that is taken, a port that is none."""
    (tmp_path / "file").write_text("")
    taken = socket.create_server(("0.0.0.0", 0))
    for options in (
        {"directory": str(tmp_path / "file" / "below")},
        {"directory": "/proc/1/nowhere"},
        {"metrics_port": taken.getsockname()[1]},
        {"metrics_port": 70_000},
    ):
        with pytest.raises(InputError, match="RDT112: statistics of producer 3"):
            Observer("producer", 3, "f" * 64, **options)
    taken.close()


def test_metrics_are_served_over_http() -> None:
    """Counted by result, with role and number."""
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    number = int(time.time())
    observer = Observer("producer", number, "f" * 64, metrics_port=port)
    observer.succeeded(REPORT)
    observer.succeeded(REPORT)
    observer.failed(8, ValueError("x"))
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
    who = f'id="{number}",'
    assert f'rdtexec_syncs_total{{{who}result="ok",role="producer"}} 2.0' in text
    assert f'rdtexec_syncs_total{{{who}result="failed",role="producer"}} 1.0' in text
    assert f'rdtexec_bytes_total{{{who}role="producer"}} 6.0' in text
