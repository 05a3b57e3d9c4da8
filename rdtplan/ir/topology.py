"""The two fleets and how they talk: trainer layout, inference topology, transfer settings."""

from attrs import field, frozen

from rdtplan.ir.manifest import Ints

OMITTED = {"omitted": True}
"""Field metadata: left out where it has its default, so that what does not use it has the bytes that it had before."""


@frozen(slots=True)
class InferenceTopology:
    """Sizes of one deployment and the number of independent engines that run it."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    replicas: int = 1
    redundant_experts: int | None = field(default=None, metadata=OMITTED)
    """With EPLB: how many slots for experts a layer has beyond one for each; None: EPLB is off."""

    @property
    def workers_per_replica(self) -> int:
        return self.data_parallel * self.pipeline_parallel * self.tensor_parallel

    @property
    def workers(self) -> int:
        return self.replicas * self.workers_per_replica


@frozen(slots=True, order=True)
class Position:
    """Where one worker stands in its deployment."""

    dp: int
    pp: int
    tp: int

    def __str__(self) -> str:
        return f"DP{self.dp} PP{self.pp} TP{self.tp}"


def worker_index(topology: InferenceTopology, position: Position) -> int:
    """Index of a worker in its replica, as vLLM numbers them: `dp * (TP * PP) + pp * TP + tp`."""
    tp, pp = topology.tensor_parallel, topology.pipeline_parallel
    return position.dp * tp * pp + position.pp * tp + position.tp


def consumer_id(topology: InferenceTopology, replica: int, position: Position) -> int:
    """Fleet-wide id: `replica * workers_per_replica + worker_index`."""
    return replica * topology.workers_per_replica + worker_index(topology, position)


def positions(topology: InferenceTopology) -> tuple[Position, ...]:
    """All positions of one replica in worker-index order."""
    return tuple(
        Position(dp, pp, tp)
        for dp in range(topology.data_parallel)
        for pp in range(topology.pipeline_parallel)
        for tp in range(topology.tensor_parallel)
    )


@frozen(slots=True)
class Ownership:
    """Which trainer ranks hold each name.

    Classes are numbered by first appearance in manifest order; `class_of[k]` is the owner class of name k.
    """

    ranks: int
    """Number of trainer ranks."""
    classes: tuple[Ints, ...]
    """Distinct owner sets, each sorted ascending."""
    class_of: Ints

    def owners(self, k: int) -> Ints:
        return self.classes[self.class_of[k]]


@frozen(slots=True)
class TransferSettings:
    """What sizes buffers and pipelines. Names are those of the runtime's settings."""

    num_rdt_buffers: int = 2
    """K: receive slots and pulls in flight a lane."""
    buffer_presize_gb: float = 0.0
    """Floor of the slot size, GiB."""
    stages_in_flight: int = 1
    """S: streams pulled at once."""
    staging_device: str = "gpu"
    """`gpu` (the worker's own device) or `host`."""
    gather_lookahead: int = 1
    max_chunk_bytes: int = 0
    """A chunk is never packed larger than this; 0 means no limit."""
