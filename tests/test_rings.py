"""Serve rings: a chunk packed anew every sync is right, and a group that was released is held by nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from rdtexec.destination import packed_slice
from rdtexec.plans import chunk_keys, load_trainer
from rdtexec.transport.packed import ServeRings
from rdtplan.ir.file import write_plan
from rdtplan.ir.topology import InferenceTopology, TransferSettings
from tests.plans import Scenario, Sizes, make_plan

torch = pytest.importorskip("torch")


def test_a_released_group_is_held_by_nobody(tmp_path: Path) -> None:
    """A gather allocates anew for every group of every sync: what packing keeps must not keep those tensors."""
    scenario = Scenario(
        Sizes(layers=3, dense_layers=1), InferenceTopology(2), TransferSettings(max_chunk_bytes=300), trainer_ranks=1
    )
    write_plan(make_plan(scenario), tmp_path / "p")
    plan = load_trainer(tmp_path / "p", 0)
    rings = ServeRings(plan, {c: (c,) for c in plan.consumers}, lambda n: torch.zeros(n, dtype=torch.uint8))
    for sync in range(3):
        for group in plan.producer.groups:
            tensors = {
                k: torch.full(plan.manifest.shape(k), sync + 1.0, dtype=getattr(torch, plan.manifest.dtype(k)))
                for k in plan.own_names(group)
            }
            held = [StorageWeakRef(t.untyped_storage()) for t in tensors.values()]
            rings.publish(group, tensors)
            del tensors
            for consumer, worker in plan.consumers.items():
                chunks = worker.program.chunks
                for chunk in (c for c, g in enumerate(chunks.group) if g == group):
                    slot = rings.pack(consumer, chunk, worker.routing.seq[chunk])
                    memory, slot_nbytes = rings.ring(consumer)
                    at = slot * slot_nbytes
                    for k in chunk_keys(worker.program, chunk):
                        assert (packed_slice(worker.program, k, memory[at : at + slot_nbytes]) == sync + 1.0).all()
            assert not any(ref.expired() for ref in held)
            rings.release(group)
            assert all(ref.expired() for ref in held), f"sync {sync} keeps tensors of group {group}"
