"""Traces to plan. Every pass is a pure function from Draft to Draft, in a file named for what it does.

Adding a pass is writing one file and one line here.
"""

from __future__ import annotations

from collections.abc import Callable

from rdtplan.passes.bound_lifetimes import bound_lifetimes
from rdtplan.passes.classify_owners import classify_owners
from rdtplan.passes.connect_streams import connect_streams
from rdtplan.passes.cut_slices import cut_slices
from rdtplan.passes.draft import Draft
from rdtplan.passes.forecast_memory import forecast_memory
from rdtplan.passes.group_names import group_names
from rdtplan.passes.number_sequences import number_sequences
from rdtplan.passes.pack_chunks import pack_chunks
from rdtplan.passes.part_sources import part_sources
from rdtplan.passes.place_experts import place_experts
from rdtplan.passes.route_chunks import route_chunks
from rdtplan.passes.serve_chunks import serve_chunks
from rdtplan.passes.time_free_signals import time_free_signals

PASSES: tuple[Callable[[Draft], Draft], ...] = (
    place_experts,
    part_sources,
    group_names,
    classify_owners,
    cut_slices,
    pack_chunks,
    connect_streams,
    bound_lifetimes,
    time_free_signals,
    route_chunks,
    number_sequences,
    serve_chunks,
    forecast_memory,
)
"""The pipeline, in order."""


def run_passes(draft: Draft) -> Draft:
    """Apply every pass in order. Errors are those of the single passes (PlanError)."""
    for step in PASSES:
        draft = step(draft)
    return draft
