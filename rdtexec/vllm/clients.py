"""Several independent engines behind one client: each call goes to all replicas that take part, at the same time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

from rdtexec.calls import Call
from rdtplan.errors import InputError, TransferError


def call_within(timeout_s: float, client: Any, method: str, *args: Any) -> None:
    """Call a method of a client; TransferError RDT602 when it, or one replica, takes longer than `timeout_s` seconds.

    A client may do a bare `ray.get`, which a stopped worker would keep for ever.
    """
    if isinstance(client, ReplicaClient):
        with client.answering_within(timeout_s):
            getattr(client, method)(*args)
    else:
        Call(method, partial(getattr(client, method), *args)).result(timeout_s)


class ReplicaClient:
    """A `VLLMWeightSyncClient` over one client a replica, in the order of replica ranks."""

    def __init__(self, clients: Sequence[VLLMWeightSyncClient]) -> None:
        self.clients = tuple(clients)
        self._within_s: float | None = None
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
        more = {"num_replicas": len(self.clients)}
        self._all(
            "init_weight_transfer_engine",
            lambda i, c: c.init_weight_transfer_engine({**init_info, "replica_rank": i, **more}),
        )

    def start_draft_weight_update(self) -> None:
        """Let every replica show its draft model."""
        self._all("start_draft_weight_update", lambda _, c: c.start_draft_weight_update())  # type: ignore[attr-defined]

    def start_weight_update(self) -> None:
        """Start everywhere or nowhere: where it began although another replica failed, it is abandoned.

        Not finished: a replica whose last sync failed has nothing that it could serve.
        """
        started: set[int] = set()

        def start(replica: int, client: VLLMWeightSyncClient) -> None:
            client.start_weight_update()
            started.add(replica)

        try:
            self._all("start_weight_update", start)
        except TransferError:
            with contextlib.suppress(TransferError):  # the first error is the one to be told
                self._all("update_weights", lambda _, c: c.update_weights({"abandon": True}), started)
            raise

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._all("update_weights", lambda _, c: c.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update", lambda _, c: c.finish_weight_update(weight_version))

    @contextlib.contextmanager
    def answering_within(self, timeout_s: float) -> Iterator[None]:
        """In the body, each replica has so many seconds for each call; elsewhere, as many as it takes."""
        self._within_s = timeout_s
        try:
            yield
        finally:
            self._within_s = None

    def _all(
        self,
        what: str,
        call: Callable[[int, VLLMWeightSyncClient], None],
        replicas: Collection[int] | None = None,
    ) -> None:
        """Call every live replica, or these; TransferError names those that failed, or did not answer in time.

        It is raised after all others have answered.
        """
        chosen = sorted(self._live if replicas is None else replicas)
        calls = {i: Call(what, partial(call, i, self.clients[i])) for i in chosen}
        deadline = None if self._within_s is None else time.monotonic() + self._within_s
        errors: dict[int, Exception] = {}
        for i, under_way in calls.items():
            try:
                under_way.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except Exception as error:
                errors[i] = error
        if errors:
            words = "; ".join(f"replica {i}: {type(e).__name__}: {e}" for i, e in errors.items())
            silent = all(getattr(e, "code", "") == "RDT602" for e in errors.values())
            raise TransferError(
                words, fix="look at the log of that server", code="RDT602" if silent else "RDT606"
            ) from next(iter(errors.values()))
