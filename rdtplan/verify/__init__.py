"""Verification of plans: completeness, structure and digests. Returns findings; refuses nothing by itself."""

from __future__ import annotations

from rdtplan.ir.plan import FleetPlan
from rdtplan.verify.coverage import Prover, TooScattered, check_destinations, check_sources
from rdtplan.verify.experts import check_experts
from rdtplan.verify.findings import Finding, refuse, unwaived, waived
from rdtplan.verify.loaders import check_entries, check_loaders
from rdtplan.verify.ranks import check_ranks
from rdtplan.verify.structure import check_fleet, check_worker

__all__ = ["Finding", "check_entries", "check_loaders", "check_worker", "refuse", "unwaived", "verify_fleet", "waived"]


def verify_fleet(plan: FleetPlan) -> list[Finding]:
    """Everything that can be wrong with a plan, over the whole fleet. Structural faults hide the rest."""
    findings = check_fleet(plan)
    if findings:
        return findings
    try:
        return _check_coverage(plan)
    except TooScattered as error:
        return [Finding("RDT330", f"plan: its writes and reads lie in {error}", ("regions",))]


def _check_coverage(plan: FleetPlan) -> list[Finding]:
    findings: list[Finding] = []
    prover = Prover()
    programs = {id(c.program): c for c in plan.consumers}
    for consumer in programs.values():
        where = f"worker {consumer.consumer_id} ({consumer.position})"
        findings += check_destinations(consumer.program, prover, where)
    findings += check_ranks(plan, prover) + check_experts(plan)
    tied = plan.model.tied_embeddings
    return findings + check_sources(plan.manifest, [c.program for c in programs.values()], prover, tied_head=tied)
