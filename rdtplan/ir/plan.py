"""The plan. These classes *are* the format; `schemas/` is generated from them.

FORMAT is `major.minor`. Raise minor when a field with a default is added: older readers ignore it. Raise
major when a reader that ignores the change would move a wrong byte; then write a migration. A reader refuses
a major it does not know.

Three layers, so that what repeats is stored once:

- a *program* is what one worker pulls, writes and signals, without any trainer rank in it. Workers that do
  the same (replicas, data-parallel copies) share one.
- a *consumer plan* is a program and its routing: the producer and the sequence number of every chunk.
- a *producer plan* is what one trainer rank publishes and serves, in order.

All tables are columns of equal length. Sizes and offsets named `nbytes` or `offset` in Keys and Chunks are
bytes; everything inside a Region is elements.
"""

from attrs import field, frozen

from rdtplan.ir.experts import NO_EXPERTS, Experts
from rdtplan.ir.manifest import Ints, Manifest
from rdtplan.ir.operations import Expression, Leaves, Operations
from rdtplan.ir.regions import Region
from rdtplan.ir.topology import OMITTED, InferenceTopology, Ownership, Position, TransferSettings
from rdtplan.ir.traces import Fills, Parameters

FORMAT = "1.0"
ALIGNMENT = 16
"""Bytes: every slice of a packed chunk starts at a multiple of this."""

SHARED = {"shared": True}
"""Field metadata: the value is stored as a part of its own, once however often it occurs."""


@frozen(slots=True)
class ModelIdentity:
    """Which model the plan was compiled for. No path of the compiling machine."""

    architecture: str
    dtype: str
    quantization: str | None
    config_digest: str
    """SHA-256 of the canonical `config.json`."""
    tied_embeddings: bool = False
    """Does the config tie the head to the embedding?"""


@frozen(slots=True)
class Compiler:
    """Versions that shaped the plan."""

    rdtplan: str
    vllm: str
    torch: str
    target: str
    """Platform the workers run on: `cpu`, `sm90`, ..."""


@frozen(slots=True)
class GatherGroup:
    """A run of consecutive source names that the trainer gathers, publishes and frees together."""

    label: str
    first: int
    """Manifest index of the first name."""
    count: int
    nbytes: int
    """Bytes of all its full tensors."""


@frozen(slots=True)
class Keys:
    """FetchKeys, chunk by chunk. `offset` is where the slice starts in its packed chunk, bytes."""

    source: Ints
    """Manifest index."""
    region: Ints
    """Index into the program's regions; elements of the contiguous full tensor."""
    dtype: Ints
    """Index into the program's dtype table."""
    offset: Ints

    def __len__(self) -> int:
        return len(self.source)


@frozen(slots=True)
class Scatters:
    """Recorded copies, chunk by chunk: the slice of `key` goes to `region` of `parameter`."""

    key: Ints
    parameter: Ints
    region: Ints

    def __len__(self) -> int:
        return len(self.key)


@frozen(slots=True)
class Chunks:
    """Packed pulls in issue order."""

    group: Ints
    owner_class: Ints
    stream: Ints
    key_end: Ints
    """Keys of chunk k are `key_end[k-1] : key_end[k]`."""
    scatter_end: Ints
    """Scatters of chunk k are `scatter_end[k-1] : scatter_end[k]`."""
    nbytes: Ints
    """Bytes of the packed chunk, padding included."""

    def __len__(self) -> int:
        return len(self.group)


@frozen(slots=True)
class Lifetimes:
    """Leaf modules the program writes: materialize before `first`, complete after `last` (chunk indices)."""

    module: Ints
    """Index into `Parameters.module_names`."""
    first: Ints
    last: Ints


@frozen(slots=True)
class Provenance:
    """Where each write came from: for people, and outside every digest that two sides compare.

    A vLLM release that only respells its loaders changes this and nothing else, so it changes no plan.
    """

    loaders: tuple[str, ...]
    """`function (file:line)`."""
    chains: tuple[tuple[str, ...], ...]
    """Op chains in words, outermost operation last."""
    scatter_loader: Ints
    """A scatter: index into `loaders`."""
    scatter_chain: Ints
    """A scatter: index into `chains`."""
    fill_loader: Ints
    """A fill: index into `loaders`."""
    operation_loader: Ints
    """An operation: index into `loaders`."""


@frozen(slots=True)
class Program:
    """What one worker pulls, writes and signals; shared by all workers that do the same."""

    position: Position
    """The position it was traced at."""
    geometry_digest: str
    """SHA-256 over names, kinds, dtypes, shapes, strides and aliases of `parameters`."""
    dtype_table: tuple[str, ...]
    untouched: tuple[str, ...]
    """Names that no loader writes: buffers that the model computes itself, and parameters whose finding was
    waived.
    """
    untouched_reasons: tuple[str, ...]
    """Why each of them may stay as it is; for people, and in no digest."""
    parameters: Parameters = field(metadata=SHARED)
    regions: tuple[Region, ...] = field(metadata=SHARED)
    keys: Keys = field(metadata=SHARED)
    scatters: Scatters = field(metadata=SHARED)
    chunks: Chunks = field(metadata=SHARED)
    fills: Fills = field(metadata=SHARED)
    operations: Operations = field(metadata=SHARED)
    """Computed writes. Those of a module are evaluated in this order after its last scatter, before it is completed."""
    leaves: Leaves = field(metadata=SHARED)
    expressions: tuple[Expression, ...] = field(metadata=SHARED)
    lifetimes: Lifetimes = field(metadata=SHARED)
    free_after: Ints = field(metadata=SHARED)
    """A gather group: the chunk whose completion frees it, or -1: signalled at sync start (nothing of it is
    pulled).
    """
    provenance: Provenance = field(metadata=SHARED)
    experts: Experts = field(default=NO_EXPERTS, metadata=SHARED | OMITTED)
    """Which logical expert is in which slot, under EPLB."""


@frozen(slots=True)
class Routing:
    """Producer and sequence number of every chunk of one consumer, and the digest agreed with each
    producer.
    """

    producer: Ints
    seq: Ints
    """Counts this consumer's chunks from this producer; serve slot = seq % K."""
    pair_digests: tuple[tuple[int, str], ...]
    """(producer rank, SHA-256 of everything that pair agrees on), ascending."""


@frozen(slots=True)
class ConsumerPlan:
    """What one worker executes."""

    consumer_id: int
    replica: int
    position: Position
    digest: str
    """SHA-256 over program and routing, provenance left out."""
    program: Program = field(metadata=SHARED)
    routing: Routing = field(metadata=SHARED)


@frozen(slots=True)
class Serving:
    """Chunks that one producer packs for one consumer, by sequence number."""

    consumer_id: int
    chunks: Ints
    slot_nbytes: int
    """Largest of these chunks, bytes."""


@frozen(slots=True)
class ProducerPlan:
    """What one trainer rank publishes and serves."""

    rank: int
    groups: Ints
    """Gather groups this rank owns part of, in plan order."""
    signals: Ints
    """Free signals that release each of `groups` (one from every consumer)."""
    group_nbytes: Ints
    """Bytes of this rank's own names in each of `groups`."""
    servings: tuple[Serving, ...]


@frozen(slots=True)
class MemoryForecast:
    """Peak bytes by part, from the plan alone."""

    receive_slot_nbytes: int
    """One receive slot: the largest chunk (or the presize floor) rounded up to 256 MiB."""
    receive_pool_nbytes: Ints
    """A consumer: min(S, streams) * K slots."""
    serve_ring_nbytes: Ints
    """A producer: K slots for every distinct consumer plan it serves."""
    resident_gather_nbytes: Ints
    """A producer: (gather_lookahead + 1) * its largest group."""


@frozen(slots=True)
class Overview:
    """Figures of the whole fleet, so that an inspection need not open the parts."""

    source_names: int
    manifest_nbytes: int
    """Bytes of the whole model: what a broadcast sends to every worker."""
    pulled_nbytes: Ints
    """Packed bytes, a consumer."""
    pulls: Ints
    scatters: Ints
    streams: Ints
    parameters: Ints
    served_nbytes: Ints
    """Packed bytes, a producer."""
    served_pulls: Ints
    gathered_nbytes: Ints
    """Bytes that each trainer rank receives from others to put names together which several ranks own as a whole and,
    as FSDP does, hold in equal parts; 0 where it serves the pieces that it holds."""


@frozen(slots=True)
class Waiver:
    """A finding the user accepted: names that match `pattern` may raise `code`."""

    code: str
    pattern: str


@frozen(slots=True)
class FleetPlan:
    """Everything, sealed together."""

    compiler: Compiler
    model: ModelIdentity
    topology: InferenceTopology
    settings: TransferSettings
    overview: Overview
    memory: MemoryForecast
    notes: tuple[str, ...]
    """What the compiler changed and says so, a reordered manifest for one."""
    waivers: tuple[Waiver, ...]
    identity: str
    """SHA-256 over everything that decides what is moved where: digests of manifest, ownership and consumers, model,
    target, topology and settings. Versions and provenance are left out; both ends of a connection compare it.
    """
    manifest_digest: str
    ownership_digest: str
    manifest: Manifest = field(metadata=SHARED)
    ownership: Ownership = field(metadata=SHARED)
    groups: tuple[GatherGroup, ...] = field(metadata=SHARED)
    consumers: tuple[ConsumerPlan, ...] = field(metadata={"parts": True})
    """One part each, so that a worker loads its own alone."""
    producers: tuple[ProducerPlan, ...] = field(metadata={"parts": True})
