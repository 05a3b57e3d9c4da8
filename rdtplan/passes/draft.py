"""The plan under construction: what every pass takes and returns."""

from __future__ import annotations

from attrs import field, frozen

from rdtplan.ir.experts import Placement
from rdtplan.ir.manifest import Ints, Manifest, Piece
from rdtplan.ir.plan import Chunks, GatherGroup, Keys, Lifetimes, MemoryForecast, ProducerPlan, Provenance, Scatters
from rdtplan.ir.topology import InferenceTopology, Ownership, TransferSettings
from rdtplan.ir.traces import RankTrace


@frozen(slots=True)
class ProgramDraft:
    """One distinct worker trace on its way to a `Program`."""

    trace: RankTrace
    keys: Keys | None = None
    scatters: Scatters | None = None
    chunks: Chunks | None = None
    provenance: Provenance | None = None
    lifetimes: Lifetimes | None = None
    free_after: Ints = ()


@frozen(slots=True)
class RouteDraft:
    """Routing of one worker index; the same in every replica, because the carve is per deployment."""

    producer: Ints
    seq: Ints = ()


@frozen(slots=True)
class Draft:
    """Inputs first, then what the passes add, in the order in which they add it."""

    manifest: Manifest
    owners: tuple[Ints, ...]
    """Trainer ranks that hold each name, ascending."""
    trainer_ranks: int
    topology: InferenceTopology
    settings: TransferSettings
    programs: tuple[ProgramDraft, ...]
    program_of: Ints
    """Worker index in a replica -> index into `programs`."""
    pieces: tuple[tuple[Piece, ...], ...] = ()
    """Pieces in which each name is held, none where its owners have all of it; or no column at all."""
    placement: Placement | None = None
    """Which expert every slot is to hold, under EPLB; None: that of the traces."""
    notes: tuple[str, ...] = ()
    groups: tuple[GatherGroup, ...] = ()
    group_of: Ints = ()
    """Manifest index -> gather group."""
    ownership: Ownership | None = None
    component_of: Ints = ()
    """Gather group -> stage stream."""
    routes: tuple[RouteDraft, ...] = ()
    """A worker index."""
    producers: tuple[ProducerPlan, ...] = ()
    memory: MemoryForecast | None = field(default=None)
