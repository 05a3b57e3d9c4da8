"""Several independent engines behind one client: each call goes to all replicas that take part, at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

from rdtplan.errors import InputError, TransferError


class ReplicaClient:
    """A `VLLMWeightSyncClient` over one client a replica, in the order of replica ranks."""

    def __init__(self, clients: Sequence[VLLMWeightSyncClient]) -> None:
        self.clients = tuple(clients)
        self._live = frozenset(range(len(self.clients)))

    def limit_to(self, consumers: Collection[int], workers_per_replica: int) -> None:
        """From now on drive only the replicas of these consumers; InputError RDT113 when that cuts through one."""
        chosen = set(consumers)
        live = {c // workers_per_replica for c in chosen}
        for replica in live:
            members = set(range(replica * workers_per_replica, (replica + 1) * workers_per_replica))
            if not members <= chosen:
                raise InputError(
                    f"replica {replica} has consumers {sorted(members)}, {sorted(members - chosen)} are not live",
                    fix="an engine takes part as a whole: leave out all of its consumers",
                    code="RDT113",
                )
        self._live = frozenset(live)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Initialize every replica with its own rank."""
        count = len(self.clients)
        self._all(lambda i, c: c.init_weight_transfer_engine({**init_info, "replica_rank": i, "num_replicas": count}))

    def start_draft_weight_update(self) -> None:
        """Let every replica show its draft model."""
        self._all(lambda _, c: c.start_draft_weight_update())  # type: ignore[attr-defined]

    def start_weight_update(self) -> None:
        """Start everywhere or nowhere: where it began although another replica failed, it is abandoned.

        Not finished: a replica whose last sync failed has nothing that it could serve.
        """
        started: set[int] = set()

        def start(replica: int, client: VLLMWeightSyncClient) -> None:
            client.start_weight_update()
            started.add(replica)

        try:
            self._all(start)
        except TransferError:
            for replica in started:
                with contextlib.suppress(Exception):  # the first error is the one to be told
                    self.clients[replica].update_weights({"abandon": True})
            raise

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._all(lambda _, c: c.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all(lambda _, c: c.finish_weight_update(weight_version))

    def _all(self, call: Callable[[int, VLLMWeightSyncClient], None]) -> None:
        """Call every live replica; TransferError names those that failed, after all have answered."""
        live = sorted(self._live)
        with ThreadPoolExecutor(len(live)) as threads:
            calls = {i: threads.submit(call, i, self.clients[i]) for i in live}
        errors = {i: e for i, c in calls.items() if (e := c.exception()) is not None}
        if errors:
            what = "; ".join(f"replica {i}: {type(e).__name__}: {e}" for i, e in errors.items())
            raise TransferError(what, fix="look at the log of that server", code="RDT606") from next(
                iter(errors.values())
            )
