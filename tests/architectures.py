"""One architecture against stock vLLM: every rank of a layout loaded by vLLM and by the plan, and compared.

Real models with CPU kernels are not needed to load weights, so what the CPU build of vLLM lacks for some architectures
is stood in for here: a backend for sparse attention, experts without a gate, AMX, CUDA streams, and torchvision, which
image processors import. None of it touches a weight.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import oracle
import torch
from attrs import field, frozen
from oracle import Rank, Sources

from rdtplan.compiler import Fleet, compile_plan
from rdtplan.errors import InputError, PlanError, RdtError, TraceError
from rdtplan.ir.manifest import SourceTensor
from rdtplan.ir.plan import FleetPlan, Program, Waiver
from rdtplan.ir.topology import InferenceTopology, Position, positions
from rdtplan.trace.model import ZEROED
from rdtplan.verify.findings import WAIVABLE

LAYOUTS = {
    "tp1": InferenceTopology(),
    "tp2": InferenceTopology(tensor_parallel=2),
    "tp2-ep": InferenceTopology(tensor_parallel=2, expert_parallel=True),
    "dp2-ep": InferenceTopology(data_parallel=2, expert_parallel=True),
    "pp2": InferenceTopology(pipeline_parallel=2),
}


@frozen
class Outcome:
    """What came of one model in one layout."""

    status: str
    """`exact`; `waived`: exact once the findings in `reason` are accepted by name; `refused`; `different`; `stock`:
    vLLM itself does not load it.
    """
    reason: str = ""
    ranks: int = 0
    parameters: int = 0
    operations: int = 0
    tensors: dict[str, int] = field(factory=dict)
    """Differing tensors and bytes."""


# -- what the CPU build lacks -------------------------------------------------------------------------------------


class _AnyClass(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Anything(metaclass=_AnyClass):
    """Stands for every class and function of a module that is imported and not used."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


def _empty_package(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__version__ = "0.0.0"  # type: ignore[attr-defined]
    module.__getattr__ = lambda attribute: _raise_or_any(name, attribute)  # type: ignore[method-assign]
    return module


def _raise_or_any(module: str, attribute: str) -> Any:
    if attribute.startswith("__"):
        raise AttributeError(f"{module}.{attribute}")
    return _AnyClass(attribute, (_Anything,), {})


_TORCHVISION = [
    "torchvision",
    *(f"torchvision.{n}" for n in ("io", "ops", "transforms", "transforms.v2", "transforms.functional")),
    *("torchvision.transforms.v2.functional", "torchvision.ops.boxes"),
]


@contextlib.contextmanager
def cpu_stand_ins() -> Iterator[None]:
    """What lets the CPU build of vLLM construct every architecture. vLLM is imported inside."""
    from rdtplan.trace.model import import_vllm

    with contextlib.ExitStack() as stack:
        import_vllm()
        if importlib.util.find_spec("torchvision") is None:
            packages = {name: _empty_package(name) for name in _TORCHVISION}
            for name in _TORCHVISION[1:]:
                parent, _, child = name.rpartition(".")
                setattr(packages[parent], child, packages[name])
            stack.enter_context(mock.patch.dict(sys.modules, packages))
        from vllm import _custom_ops
        from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl
        from vllm.model_executor.layers.fused_moe import config as moe_config
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe
        from vllm.platforms import current_platform
        from vllm.platforms.cpu import CpuPlatform
        from vllm.v1.attention.backend import AttentionBackend
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

        stock_choice = CpuPlatform.get_attn_backend_cls.__func__

        def choose(cls: Any, selected_backend: Any, attn_selector_config: Any, **others: Any) -> str:
            return stock_choice(cls, selected_backend, attn_selector_config._replace(use_sparse=False), **others)

        stack.enter_context(mock.patch.object(CpuPlatform, "get_attn_backend_cls", classmethod(choose)))
        gateless = mock.Mock(wraps=current_platform)
        gateless.is_xpu.return_value = True
        stack.enter_context(mock.patch.object(moe_config, "current_platform", gateless))
        dense_init = MLACommonImpl.__init__
        known = inspect.signature(dense_init).parameters

        def without_indices(self: Any, *args: Any, **others: Any) -> None:
            """Sparse attention hands over where its indices lie."""
            dense_init(self, *args, **{k: v for k, v in others.items() if k in known})

        stack.enter_context(mock.patch.object(MLACommonImpl, "__init__", without_indices))
        alibi_init = CPUAttentionBackendImpl.__init__

        def alibi_too(self: Any, *args: Any, use_alibi_sqrt: bool = False, **others: Any) -> None:
            alibi_init(self, *args, **others)

        for experts in [c for c in vars(cpu_moe).values() if isinstance(c, type) and "_supports_activation" in vars(c)]:
            for question in ("_supports_activation", "_supports_no_act_and_mul"):
                stack.enter_context(mock.patch.object(experts, question, staticmethod(lambda *_: True)))
        stack.enter_context(mock.patch.object(AttentionBackend, "supports_alibi_sqrt", classmethod(lambda _: True)))
        stack.enter_context(mock.patch.object(CPUAttentionBackendImpl, "__init__", alibi_too))
        stack.enter_context(mock.patch.object(_custom_ops, "_supports_cpu_fp8_w8a16", True))
        stack.enter_context(mock.patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True))
        stack.enter_context(mock.patch.object(torch.cuda, "Stream", _Anything))
        stack.enter_context(mock.patch.object(torch.cuda, "Event", _Anything))
        yield


# -- the check ------------------------------------------------------------------------------------------------------


def is_moe(config_dir: Path) -> bool:
    """Does vLLM take the model for a mixture of experts?"""
    from rdtplan.trace.model import engine_config

    return bool(engine_config(config_dir, InferenceTopology(), Position(0, 0, 0)).model_config.is_moe)


@frozen
class Reference:
    """What stock `load_weights` leaves on every rank of a layout, and from what."""

    config_dir: Path
    topology: InferenceTopology
    entries: Sequence[SourceTensor]
    sources: Sources
    ranks: list[Rank]
    stock: list[dict[str, torch.Tensor]]
    """The bytes of each rank's tensors, by name."""


def check(config_dir: Path, name: str, topology: InferenceTopology, seed: int = 0) -> Outcome:
    """Compile a corpus model for a layout and compare every rank with stock `load_weights`."""
    reference = stock_reference(config_dir, name, topology, seed)
    return reference if isinstance(reference, Outcome) else check_plan(reference)


def stock_reference(config_dir: Path, name: str, topology: InferenceTopology, seed: int = 0) -> Reference | Outcome:
    """Every rank of a corpus model, loaded by vLLM; the outcome `stock` when vLLM does not load it."""
    entries = oracle.corpus_manifest(name)
    sources = oracle.finite_sources(entries, seed)
    ranks = [Rank(config_dir, topology, position) for position in positions(topology)]
    stock: list[dict[str, torch.Tensor]] = []
    for rank in ranks:
        try:
            stock.append(loaded(rank, lambda model: oracle.load_stock(model, sources)))
        except Exception as error:
            return Outcome("stock", _words(error).replace(f" from {config_dir}", ""))
    return Reference(config_dir, topology, entries, sources, ranks, stock)


def check_plan(reference: Reference) -> Outcome:
    """Compile a plan for the layout of a reference, execute it on every rank, and compare."""
    try:
        plan, waivers = _compile(reference.config_dir, reference.entries, reference.topology)
    except RdtError as error:
        return Outcome("refused", f"{error.code} {error.message.splitlines()[0]}"[:300])
    return _compare(plan, waivers, reference)


def _compile(config_dir: Path, entries: Any, topology: InferenceTopology) -> tuple[FleetPlan, tuple[Waiver, ...]]:
    """The plan; findings that a user may accept are accepted, name by name, and returned."""
    waivers: tuple[Waiver, ...] = ()
    while True:
        try:
            return compile_plan(config_dir, entries, Fleet(topology=topology, waivers=waivers), jobs=1), waivers
        except PlanError as error:
            found = getattr(error, "findings", ())
            new = tuple(Waiver(f.code, n) for f in found if f.code in WAIVABLE for n in f.names)
            if not new or any(f.code not in WAIVABLE for f in found) or set(new) <= set(waivers):
                raise
            waivers = tuple(dict.fromkeys((*waivers, *new)))


def _compare(
    plan: FleetPlan,
    waivers: tuple[Waiver, ...],
    reference: Reference,
) -> Outcome:
    different: dict[str, int] = {}
    for rank, stock, consumer in zip(reference.ranks, reference.stock, plan.consumers, strict=True):
        program, wanted = consumer.program, dict(stock)

        zeroed: set[str] = set()

        def load(model: torch.nn.Module, program: Program = program, zeroed: set[str] = zeroed) -> None:
            oracle.load_planned(model, program, plan.manifest, reference.sources, "packed")
            parameters = model.named_parameters(remove_duplicate=False)
            zeroed.update(name for name, parameter in parameters if getattr(parameter, ZEROED, False))

        planned = loaded(rank, load)
        kept = {*program.untouched, *(w.pattern for w in waivers if w.code == "RDT310")}
        for tensor in kept & set(planned):  # nobody writes it: each model holds its own poison, or the layer's zeros
            untouched = 0 if tensor in zeroed else oracle.STOCK_POISON
            if (planned[tensor] == oracle.PLAN_POISON).all() and (wanted[tensor] == untouched).all():
                del planned[tensor], wanted[tensor]
        for tensor, count in oracle.compare(wanted, planned).items():
            different[f"{rank.position}: {tensor}"] = count
    programs = [c.program for c in plan.consumers]
    status = "different" if different else "waived" if waivers else "exact"
    first = next(iter(different), "")
    accepted = sorted({f"{w.code}:{re.sub(r'[0-9]+', 'N', w.pattern)}" for w in waivers})
    return Outcome(
        status,
        f"{len(different)} tensors, the first {first}" if different else ", ".join(accepted),
        len(reference.ranks),
        sum(p.parameters.held for p in programs),
        sum(len(p.operations) for p in programs),
        different,
    )


def loaded(rank: Rank, load: Callable[[torch.nn.Module], None]) -> dict[str, torch.Tensor]:
    """The bytes of a model after a load, without plain attributes that it left alone: they may never have been set."""
    with rank.model() as model:
        before = oracle.snapshot(model)
        load(model)
        after = oracle.snapshot(model)
        held = {
            *dict(model.named_parameters(remove_duplicate=False)),
            *dict(model.named_buffers(remove_duplicate=False)),
        }
    return {n: x for n, x in after.items() if n in held or n not in before or not torch.equal(x, before[n])}


def _words(error: BaseException) -> str:
    """One line for an error of vLLM's own."""
    cause = error.__cause__ if isinstance(error, InputError | TraceError) and error.__cause__ else error
    text = str(error) if isinstance(error, RdtError) else f"{type(cause).__name__}: {cause}"
    return " ".join(text.split())[:300]
