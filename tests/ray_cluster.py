"""A small Ray cluster on this machine, for tests and the soak: one node, no dashboard, little memory."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator


def agree_on_token() -> None:
    """
    Let every process started from here on know one token, before Ray is imported anywhere.

    Ray writes one to the home directory when the first cluster of an account starts, and a process (or a fork
    server) that had looked before that keeps knowing none.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextlib.contextmanager
def ray_cluster(namespace: str | None = None) -> Iterator[str]:
    """Start one, be joined to it in `namespace`, and yield its address; its sockets lie in a short path."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
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
