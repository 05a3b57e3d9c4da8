"""One architecture by the peer, vLLM's in-process backend `sharded_rdt`, against stock vLLM, as `architectures` does it
by the plan.

It is the peer's own code from the first name to the last byte: its recorder, its plan, its producer's packing, its
pulls in order of its pipeline's first sync, its scatters, and vLLM's layerwise reload around them. It runs as it does
in an engine: on a model that stock vLLM has loaded with an *earlier* checkpoint, so that what a sync leaves alone keeps
the value of the start. Changed is only what takes the place of GPUs and of the network:

- The producer is in this process, and one consumer at a time pulls from it. It publishes full tensors as long as the
  peer's credits last (`gather_lookahead` 1). Its names are in gather order, as the peer asks of a trainer's source.
- A pull copies the packed bytes; streams, events and the two threads are left out: each step follows the one before.
- No post-processing, as on the stock side: bytes are compared as `load_weights` and the scatters leave them. Memory
  that a reload makes anew is undefined; it holds a byte pattern here, or zeros where post-processing pads with zeros.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import architectures
import oracle
import torch
from architectures import Outcome, Reference
from oracle import Rank, Sources

from rdtplan.trace.model import _is_padded

LOOKAHEAD = 1
"""The peer's default: groups that it gathers beyond those that are not freed."""


class _Refused(Exception):
    """The peer says at init that it cannot do it."""


class _Crashed(Exception):
    """It fails in the middle of a sync."""


def import_peer() -> None:
    """Import the peer and what it needs (seconds): before a fork, once for all."""
    import vllm.distributed.weight_transfer.sharded_rdt_engine
    import vllm.distributed.weight_transfer.sharded_rdt_trainer  # noqa: F401


def check(reference: Reference, seed: int = 0) -> Outcome:
    """Sync every rank of a reference by the peer. `refused`: with an error at init; `crashed`: with one in the sync."""
    earlier = oracle.finite_sources(reference.entries, seed + 1)
    different: dict[str, int] = {}
    scatters = 0
    for index, (rank, wanted) in enumerate(zip(reference.ranks, reference.stock, strict=True)):
        counts: list[int] = []

        def load(model: torch.nn.Module, index: int = index, counts: list[int] = counts) -> None:
            oracle.load_stock(model, earlier)
            counts.append(sync(model, reference.sources, index, len(reference.ranks)))

        try:
            found = architectures.loaded(rank, load)
        except _Refused as error:
            return Outcome("refused", _at(rank, error), len(reference.ranks))
        except _Crashed as error:
            return Outcome("crashed", _at(rank, error), len(reference.ranks))
        scatters += sum(counts)
        for tensor, count in oracle.compare(wanted, found).items():
            different[f"{rank.position}: {tensor}"] = count
    status = "different" if different else "exact"
    reason = f"{len(different)} tensors, the first {next(iter(different))}" if different else ""
    return Outcome(status, reason, len(reference.ranks), scatters, 0, different)


def _at(rank: Rank, error: Exception) -> str:
    cause = error.__cause__ or error
    words = " ".join(str(cause).split())
    return f"{type(cause).__name__} at {rank.position}: {words}"[:400]


def sync(model: torch.nn.Module, sources: Sources, consumer: int, consumers: int) -> int:
    """Bring `sources` into a loaded model of the current rank by the peer; the number of its scatters.

    _Refused or _Crashed with the peer's error as cause.
    """
    with _no_devices(), torch.no_grad():
        producer = _Producer(sources)
        try:
            engine = _engine(model, producer, consumer, consumers)
        except Exception as error:
            raise _Refused from error
        try:
            with _no_post_processing():
                producer.publish()
                engine.start_weight_update()
                engine.update_weights({})
                engine.finish_weight_update()
        except Exception as error:
            raise _Crashed from error
        return sum(len(chunk.scatters) for chunk in engine._cached_plan.chunks)


# -- the trainer's side -------------------------------------------------------------------------------------------


class _Producer:
    """The peer's producer server in this process, with the loop of its trainer around it.

    To the peer's router it looks like the handle of an actor.
    """

    def __init__(self, sources: Sources) -> None:
        import vllm.distributed.weight_transfer.sharded_rdt_trainer as trainer
        from vllm.distributed.weight_transfer.base import layerwise_groups

        self.sources = sources
        self.groups = layerwise_groups(list(sources))
        self.names = [name for group in self.groups for name in group]
        self._published = 0
        self._bases: dict[str, torch.Tensor] = {}
        self.server = trainer._RDTProducerServer(
            num_rdt_buffers=2, buffer_presize_gb=0.0, gather_lookahead=LOOKAHEAD, served_names=self.names
        )
        self.server._serve_device = torch.device("cpu")
        self.server.begin_sync(1, [0])
        self.free_group = SimpleNamespace(remote=self._free)
        self.pull = SimpleNamespace(remote=self._pull)

    def publish(self) -> None:
        """Gather and publish groups until the credits are used up."""
        import vllm.distributed.weight_transfer.sharded_rdt_trainer as trainer

        while self._published < len(self.groups) and len(self.server._inflight_groups) <= LOOKAHEAD:
            storages: dict[int, tuple[Any, ...]] = {}
            views: dict[str, tuple[Any, ...]] = {}
            for name in self.groups[self._published]:
                tensor = self.sources[name].contiguous()
                self._bases[name] = oracle.raw_bytes(tensor)
                storages[len(storages)] = (name, *range(6))
                dtype = str(tensor.dtype).removeprefix("torch.")
                views[name] = (len(storages) - 1, dtype, list(tensor.shape), list(tensor.stride()), 0)
            with mock.patch.object(trainer, "rebuild_cuda_tensor", lambda name, *_: self._bases[name]):
                self.server.publish_group(self._published, (storages, views))
            self._published += 1

    def _free(self, group: int) -> None:
        self.server.free_group(group)
        self.publish()

    def _pull(self, keys: list[Any], consumer_id: int, seq: int) -> torch.Tensor:
        missing = sorted({name for name, _ in keys} - set(self.server._cache))
        if missing:
            known = [g for g, group in enumerate(self.groups) if missing[0] in group]
            when = "freed before" if known and known[0] < self._published else "published only after"
            raise RuntimeError(f"the sync would stall: {missing[0]} is {when} this pull")
        return self.server.rdt_produce_weights_batched(keys, consumer_id=consumer_id, seq=seq)[0]


# -- the worker's side --------------------------------------------------------------------------------------------


def _engine(model: torch.nn.Module, producer: _Producer, consumer: int, consumers: int) -> Any:
    """The peer's engine of a worker, initialized: the model is recorded, the plan built."""
    from vllm.config import get_current_vllm_config
    from vllm.distributed.weight_transfer import sharded_rdt_engine as peer
    from vllm.distributed.weight_transfer.sharded_rdt_common import RdtRouter

    class Engine(peer.ShardedRDTWeightTransferEngine):
        """Without Ray, NIXL and threads."""

        def _resolve_producers(self, init_info: Any) -> None:
            self._router = RdtRouter(1, consumers, None, None, list(init_info.names), list(init_info.group_lens))
            self._router.validate()
            self._router.bind([producer], [producer.pull], consumer)

        def _preregister_at_init(self) -> None:
            pass

        def _ensure_proc_worker(self) -> None:
            self._slot_queued = [0] * self._ring_depth
            self._slot_done = [0] * self._ring_depth
            self._slot_read_done = [_Nothing() for _ in range(self._ring_depth)]
            self._slot_cv = mock.MagicMock()
            self._proc_stream = self._quant_stream = _Nothing()

        def _issue_pull(self, chunk: Any, slot: int) -> Any:
            blob = self._router.pull(chunk.owner, chunk.keys, chunk.seq)
            if blob.numel() != chunk.pack_bytes:
                raise RuntimeError(f"a pull of {chunk.pack_bytes} bytes brings {blob.numel()}")
            landed = blob.clone()
            return peer._PendingPull(None, chunk.keys, self._pull_targets(chunk, slot, landed), landed, slot)

        def _complete_pull(self, pending: Any) -> Any:
            return dict(zip(pending.keys, pending.targets, strict=True))

        def _dispatch_item(self, item: Any) -> None:
            self._process_item(item)

        def drain_pending(self) -> None:
            self._pending_frees.clear()

    config = get_current_vllm_config()
    parallel = SimpleNamespace(
        distributed_executor_backend="ray",
        enable_eplb=False,
        data_parallel_index=0,
        world_size=consumers,
        rank=consumer,
    )
    engine = Engine(
        SimpleNamespace(backend="sharded_rdt"),
        SimpleNamespace(parallel_config=parallel, model_config=config.model_config),
        torch.device("cpu"),
        model,
    )
    tensors = producer.sources
    engine.init_transfer_engine(
        peer.ShardedRDTWeightTransferInitInfo(
            trainer_actor_names=["producer"],
            names=producer.names,
            dtype_names=[str(tensors[n].dtype).removeprefix("torch.") for n in producer.names],
            shapes=[list(tensors[n].shape) for n in producer.names],
            group_lens=[len(group) for group in producer.groups],
            num_consumers=consumers,
        )
    )
    return engine


# -- what takes the place of a GPU --------------------------------------------------------------------------------


class _Nothing:
    """A stream or an event where every step follows the one before."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


@contextlib.contextmanager
def _no_devices() -> Iterator[None]:
    import gc

    import vllm.distributed.weight_transfer.sharded_rdt_trainer as trainer

    with contextlib.ExitStack() as stack:
        for name in ("device", "stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_: contextlib.nullcontext()))
        stack.enter_context(mock.patch.object(torch.cuda, "Event", _Nothing))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_device_index", lambda: 0))
        stack.enter_context(mock.patch.object(trainer, "register_nixl_memory", lambda *_: None))
        stack.enter_context(mock.patch.object(gc, "freeze", lambda: None))  # models here come and go
        yield


@contextlib.contextmanager
def _no_post_processing() -> Iterator[None]:
    """Reload in checkpoint format: no quantization, no packing, no weights that attention derives from others."""
    from vllm.model_executor.layers.quantization import base_config
    from vllm.model_executor.model_loader.reload import layerwise, meta

    class Never:
        """No layer has a method of this class."""

    materialize = meta.materialize_layer

    def materialize_undefined(layer: torch.nn.Module, info: Any) -> None:
        before = {name for name, tensor in meta.get_layer_tensors(layer).items() if tensor.is_meta}
        materialize(layer, info)
        for name in before:
            tensor = getattr(layer, name)
            if not tensor.is_meta:
                tensor.untyped_storage().fill_(0 if _is_padded(layer) else oracle.PLAN_POISON)

    def place(layer: torch.nn.Module, info: Any, _: Any) -> None:
        layerwise._place_kernel_tensors(layer, info)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(base_config, "QuantizeMethodBase", Never))
        stack.enter_context(mock.patch.object(layerwise, "QuantizeMethodBase", Never))
        stack.enter_context(mock.patch.object(layerwise, "_finalize_attention_layer", place))
        for module in (layerwise, meta):
            stack.enter_context(mock.patch.object(module, "materialize_layer", materialize_undefined))
        yield


def main(names: list[str], layout: str) -> None:
    """Print what the peer makes of some corpus models."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory, architectures.cpu_stand_ins():
        for name in names:
            config_dir = oracle.corpus_config(name, Path(directory))
            reference = architectures.stock_reference(config_dir, name, architectures.LAYOUTS[layout])
            found = reference if isinstance(reference, Outcome) else check(reference)
            print(name, layout, found.status, found.reason, sorted(found.tensors)[:6], flush=True)
