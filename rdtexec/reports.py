"""What one sync was, as a consumer and as a producer saw it; and where that is written down.

Every sync gives one report object. An `Observer` also logs it, appends it as one JSON line to a file, and counts it in
Prometheus metrics; all three carry the plan's identity and the number of the sync. Fields are seconds and bytes.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import sys
from pathlib import Path
from typing import Any

import attrs
import orjson
import torch
from attrs import frozen

from rdtplan.errors import InputError

LOG = logging.getLogger("rdtexec")


@frozen
class SyncReport:
    """One sync as a consumer saw it."""

    sync: int
    pulls: int
    bytes: int
    """Packed bytes of all chunks."""
    seconds: float
    wait_s: float
    """Spent waiting for producers and slots."""
    transfer_s: float
    """From ready to landed, summed over chunks; they overlap."""
    scatter_s: float
    complete_s: float
    """Spent in post-processing."""
    peak_memory: int
    """High-water mark of this process since it began: of the device's allocator, or resident memory on CPU."""
    checked: int
    """Chunks whose bytes were proved equal to the producer's source by checksum."""
    chunks: tuple[tuple[int, float, float, float, float], ...] = ()
    """(chunk, issued, ready, landed, scattered), seconds since the sync began; recorded on request."""


@frozen
class ProducerReport:
    """One sync as a producer saw it."""

    sync: int
    groups: int
    pulls: int
    """Chunks served, one for each consumer."""
    bytes: int
    """Packed bytes of the chunks served."""
    seconds: float
    gather_s: float
    publish_s: float
    serve_s: float
    """Packing chunks, where the transport packs."""
    wait_s: float
    """Spent waiting for credit and for the last signals."""
    peak_memory: int
    identical: bool
    """Were all sampled elements of this rank the same as in the last sync?"""
    sampled: int
    """Elements compared with the last sync; 0 when there was none to compare with."""


def peak_memory(device: torch.device) -> int:
    """Most bytes ever in use: by tensors on a GPU, by this process (resident) otherwise."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    kibi = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kibi


class Observer:
    """Writes down the syncs of one producer or consumer."""

    def __init__(self, role: str, number: int, identity: str, *, directory: str = "", metrics_port: int = 0) -> None:
        """`directory` gets `ROLE-NUMBER.jsonl`; a `metrics_port` other than 0 serves this process' metrics over HTTP.

        InputError RDT112 when the directory cannot be written or the port is taken.
        """
        self._role, self._number, self._identity = role, number, identity
        self._path = Path(directory) / f"{role}-{number}.jsonl" if directory else None
        try:
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.open("ab").close()
            if metrics_port:
                _serve_metrics(metrics_port)
        except (OSError, OverflowError, ImportError) as error:  # the last: no prometheus_client for a port
            raise InputError(
                f"statistics of {role} {number} (stats_dir {directory!r}, metrics_port {metrics_port}): {error}",
                fix="give a directory that can be written and a port that is free, or neither",
                code="RDT112",
            ) from None
        self._metrics = _metrics()

    def succeeded(self, report: SyncReport | ProducerReport) -> None:
        """One sync is done."""
        fields = {k: v for k, v in attrs.asdict(report).items() if k != "chunks"}
        LOG.info("sync done %s", self._words(**fields))
        self._append({"ok": True, **attrs.asdict(report)})
        if self._metrics:
            labels = (self._role, str(self._number))
            self._metrics["syncs"].labels(*labels, "ok").inc()
            self._metrics["bytes"].labels(*labels).inc(report.bytes)
            self._metrics["seconds"].labels(*labels).observe(report.seconds)
            self._metrics["peak"].labels(*labels).set(report.peak_memory)
            for name, value in fields.items():
                if name.endswith("_s"):
                    self._metrics["phase"].labels(*labels, name.removesuffix("_s")).inc(value)
            if getattr(report, "identical", False):
                self._metrics["identical"].labels(*labels).inc()

    def failed(self, sync: int, error: BaseException) -> None:
        """One sync failed."""
        LOG.error("sync failed %s: %s", self._words(sync=sync), error)
        self._append({"ok": False, "sync": sync, "error": str(error)})
        if self._metrics:
            self._metrics["syncs"].labels(self._role, str(self._number), "failed").inc()

    @property
    def verbose(self) -> bool:
        """Is every chunk to be logged?"""
        return LOG.isEnabledFor(logging.DEBUG)

    def chunk(self, event: str, sync: int, label: str) -> None:
        """Something happened to a chunk; only in the debug log."""
        LOG.debug("%s %s: %s", event, self._words(sync=sync), label)

    def _words(self, **fields: Any) -> str:
        shown = {"plan": self._identity[:12], self._role: self._number, **fields}
        return " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown.items())

    def _append(self, row: dict[str, Any]) -> None:
        """One `write` of one line, so that a reader never sees half of it. A full disk must not fail a sync."""
        if self._path is None:
            return
        row = {"role": self._role, "id": self._number, "plan": self._identity, **row}
        try:
            line = orjson.dumps(row) + b"\n"
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                written = os.write(descriptor, line)
                if written < len(line):  # take back the half line, or the next one is unreadable too
                    os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)
        except OSError as error:
            LOG.warning("statistics were not written to %s: %s", self._path, error)


_made: dict[str, Any] = {}
_served: set[int] = set()


def _metrics() -> dict[str, Any]:
    """This process' metrics, made once; empty without prometheus_client."""
    if _made:
        return _made
    try:
        from prometheus_client import Counter, Gauge, Histogram
    except ImportError:
        return {}
    who = ("role", "id")
    _made.update(
        syncs=Counter("rdtexec_syncs", "Syncs that ended, by result.", (*who, "result")),
        bytes=Counter("rdtexec_bytes", "Packed bytes moved.", who),
        seconds=Histogram("rdtexec_sync_seconds", "Duration of a sync.", who, buckets=[0.01 * 2**k for k in range(16)]),
        phase=Counter("rdtexec_phase_seconds", "Time spent in one phase of syncs.", (*who, "phase")),
        peak=Gauge("rdtexec_peak_memory_bytes", "High-water mark of memory.", who),
        identical=Counter("rdtexec_identical_payloads", "Syncs that sent what the one before had sent.", who),
    )
    return _made


def _serve_metrics(port: int) -> None:
    if port in _served:
        return
    from prometheus_client import start_http_server

    start_http_server(port)
    _served.add(port)
