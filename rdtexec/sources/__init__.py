"""The trainer's weights: what each rank declares, and how a gather group is put together when its turn comes.

A source here is at once a `GroupSource` of `rdtexec.producer` (random access, so that the plan's order need not be the
source's and nothing is kept early) and, by its methods, a vLLM `WeightSource` of 0.32 and of 0.33. vLLM is not
imported.
"""

from rdtexec.sources.base import ParamMeta, Source
from rdtexec.sources.checkpoint import CheckpointSource
from rdtexec.sources.module import LocalModuleSource, ModuleSource
from rdtexec.sources.names import split_experts, strip_wrappers
from rdtexec.sources.shards import ShardSource

__all__ = [
    "ParamMeta",
    "Source",
    "ModuleSource",
    "LocalModuleSource",
    "CheckpointSource",
    "ShardSource",
    "strip_wrappers",
    "split_experts",
]
