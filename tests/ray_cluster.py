"""A small Ray cluster on this machine, for tests and the soak: one node, no dashboard, little memory."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator


def agree_on_token() -> None:
    """
    Let every process started from here on know one token; without effect where Ray is imported already.

    Ray writes one to the home directory when the first cluster of an account starts, and a process (or a fork
    server) that had looked before that keeps knowing none.
    """
    if "ray" in sys.modules:
        return
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextlib.contextmanager
def ray_cluster(namespace: str | None = None) -> Iterator[str]:
    """Start one, be joined to it in `namespace`, and yield its address; its sockets lie in a short path.

    Ray starts actors at niceness 15; where there are fewer cores than NIXL agents, which never sleep, a ring actor
    would hardly get to run.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - its real name
    agree_on_token()
    import ray

    directory = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    try:
        context = ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 << 20,
            namespace=namespace,
            log_to_driver=False,
            _temp_dir=directory,
        )
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def another_node(address: str, ip: str) -> Iterator[subprocess.Popen[bytes]]:
    """A second node of the cluster on this machine, under a loopback address; `kill_node` ends it."""
    import ray

    before = sum(node["Alive"] for node in ray.nodes())
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--address", address]
    command += ["--node-ip-address", ip, "--num-cpus", "1", "--object-store-memory", str(80 << 20)]
    process = subprocess.Popen(command, process_group=0, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while sum(node["Alive"] for node in ray.nodes()) == before:
            assert process.poll() is None and time.monotonic() < deadline, "the second node did not join"
            time.sleep(0.2)
        yield process
    finally:
        kill_node(process)


def kill_node(process: subprocess.Popen[bytes]) -> None:
    """All processes of the node at once, as when its power fails."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
