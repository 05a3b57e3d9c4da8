"""What is expected to stay as it is or to go nowhere: accepted by the compiler itself, each family with its reason.

Nothing is left out silently. What is found here becomes a waiver of the plan, as a user would give it, and a note that
says why; everything else that no loader writes or takes is a finding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from attrs import frozen

from rdtplan.ir.manifest import Manifest
from rdtplan.ir.plan import Waiver
from rdtplan.ir.traces import RankTrace

_LAYERS = "num_nextn_predict_layers"
"""How a config counts multi-token-prediction layers; they follow the decoder layers."""
_NAMES = ("mtp.*", "*.mtp.*", "*.mtp_layers.*")
"""Names of such layers where they have an index of their own."""
_GROUP_INDEX = ".g_idx"
_SHARED = "the draft model takes this weight from the model, as vLLM has it"
_UNORDERED = "without activation order vLLM makes the index of groups by itself"
_PREDICTION = (
    "they are of a multi-token-prediction layer, which only a draft model loads; give --speculative-config if the "
    "workers run with one"
)


@frozen(slots=True)
class Expected:
    """Waivers of the compiler's own, and a sentence for each family of names."""

    waivers: tuple[Waiver, ...]
    notes: tuple[str, ...]


def expected(manifest: Manifest, traces: Sequence[RankTrace], predicting: Sequence[str]) -> Expected:
    """What of these traces needs no waiver of the user's.

    `predicting` has the patterns of multi-token-prediction layers that only a draft model loads; it is empty where the
    draft model is part of the plan.
    """
    waivers: list[Waiver] = []
    notes: list[str] = []
    kept = {name: why for trace in traces for name, why in zip(trace.kept, trace.kept_reasons, strict=True)}
    for why in dict.fromkeys(kept.values()):
        names = [name for name, reason in kept.items() if reason == why]
        patterns = tuple(dict.fromkeys(map(_pattern, names)))
        waivers += [Waiver("RDT310", pattern) for pattern in patterns]
        notes.append(f"{len(names)} parameters are not written ({', '.join(patterns)}): {why}")
    used = {source for trace in traces for source in trace.fetches.sources}
    unused = [k for k in range(len(manifest)) if k not in used]
    tied = {alias for trace in traces for aliases in trace.parameters.aliases for alias in aliases}
    shared = {source for trace in traces for source in trace.shared}
    after = {source: last for trace in traces for source, last in trace.overwritten}
    families: dict[tuple[str, str], list[str]] = {}
    """(pattern, why) -> names."""
    for k in unused:
        name = manifest.names[k]
        if any(alias.endswith(f".{name}") for alias in tied):
            continue  # a tied weight: verification notes it
        if k in shared:
            families.setdefault((name, _SHARED), []).append(name)
        elif k in after:
            stays = f"vLLM loads it where {_pattern(manifest.names[after[k]])} goes afterwards, and the last one stays"
            families.setdefault((_pattern(name), stays), []).append(name)
        elif name.endswith(_GROUP_INDEX):
            families.setdefault((f"*{_GROUP_INDEX}", _UNORDERED), []).append(name)
        else:
            for pattern in predicting:
                if fnmatchcase(name, pattern):
                    families.setdefault((pattern, _PREDICTION), []).append(name)
                    break
    for (pattern, why), names in families.items():
        waivers.append(Waiver("RDT320", pattern))
        subject = f"source name {pattern}" if pattern in names else f"{len(names)} source names {pattern}"
        notes.append(f"{subject} {'goes' if pattern in names else 'go'} nowhere: {why}")
    return Expected(tuple(dict.fromkeys(waivers)), tuple(notes))


def prediction_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Patterns of the source names of multi-token-prediction layers that a model of this `config.json` may have."""
    found: list[str] = []
    for part in (config, config.get("text_config") or {}):
        layers, extra = part.get("num_hidden_layers"), part.get(_LAYERS)
        if isinstance(layers, int) and isinstance(extra, int):
            found += [f"model.layers.{layers + k}.*" for k in range(extra)]
    return (*dict.fromkeys(found), *_NAMES)


def _pattern(name: str) -> str:
    """A name with every index replaced by a star."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
