"""What the dry run refuses and what it accepts, loader by loader.

Each loader below is the load function of a small model. Refused ones carry `# here` on the line that the
error must name; accepted ones are compiled, executed and compared with what they do for real.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import oracle
import pytest
import torch
from oracle import TinyModel, compare, finite_sources, random_sources, snapshot
from torch import Tensor

from rdtplan.errors import PlanError, TraceError
from rdtplan.ir.manifest import SourceTensor, build_manifest
from rdtplan.ir.topology import Position
from rdtplan.trace.dry_run import trace_model

Loader = Callable[[Any, Tensor], None]
"""What a model does with the source `w`."""


class Leaf(torch.nn.Module):
    """A layer with a weight, a bias and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(8, 4, dtype=torch.bfloat16), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.empty(8, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("table", torch.arange(8), persistent=False)
        self.cached = torch.zeros(8, 4, dtype=torch.bfloat16)


def small_model(loader: Loader, memory: str) -> TinyModel:
    """One leaf; `bias` and `scale` are loaded without ado, `w` by `loader`."""

    def load(model: Any, name: str, tensor: Tensor) -> None:
        if name == "w":
            loader(model, tensor)
        elif name == "other":
            model.other.copy_(tensor)
        else:
            getattr(model.leaf, name).copy_(tensor)

    model = TinyModel(load)
    with torch.device("meta" if memory == "meta" else "cpu"):
        model.leaf = Leaf()
        model.other = torch.nn.Parameter(torch.empty(4, dtype=torch.bfloat16), requires_grad=False)
    if memory == "live":
        oracle.poison(model, oracle.STOCK_POISON)
    return model


def entries(shape: tuple[int, ...] = (8, 4), dtype: str = "bfloat16") -> list[SourceTensor]:
    """The manifest: `w` comes last, when the other writes have been recorded."""
    return [
        SourceTensor("bias", "bfloat16", (8,)),
        SourceTensor("scale", "float32", (8,)),
        SourceTensor("other", "bfloat16", (4,)),
        SourceTensor("w", dtype, shape),
    ]


def place_of(loader: Loader) -> str:
    """`function (file:line)` of the line that is marked."""
    lines, first = inspect.getsourcelines(loader)
    marked = next(i for i, line in enumerate(lines) if "# here" in line)
    return f"{loader.__qualname__} (test_trace_refusals.py:{first + marked})"


# -- refused -------------------------------------------------------------------------------------------------

REFUSED: list[tuple[Loader, str, str]] = []
"""(loader, code, chain as the error must spell it)."""


def refused(code: str, chain: str) -> Callable[[Loader], Loader]:
    def register(loader: Loader) -> Loader:
        REFUSED.append((loader, code, chain))
        return loader

    return register


@refused("RDT201", "w.[0].[2]")
def reads_an_element(model: Any, w: Tensor) -> None:
    model.leaf.weight.fill_(w[0][2].item())  # here


@refused("RDT201", "w -> sum() -> gt()")
def compares(model: Any, w: Tensor) -> None:
    if w.sum() > 0:  # here
        model.leaf.weight.copy_(w)


@refused("RDT201", "w")
def reads_a_list(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(torch.tensor(w.tolist()))  # here


@refused("RDT201", "w.view(torch.int16)")
def reads_numpy(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(torch.from_numpy(w.view(torch.int16).numpy()))  # here


@refused("RDT201", "w.flatten()")
def selects_by_mask(model: Any, w: Tensor) -> None:
    flat = w.flatten()
    model.leaf.weight[0].copy_(flat[flat > 0][:4])  # here


@refused("RDT201", "w")
def looks_for_zeros(model: Any, w: Tensor) -> None:
    model.leaf.weight[: len(w.nonzero())].fill_(0)  # here


@refused("RDT201", "w")
def compares_two(model: Any, w: Tensor) -> None:
    if not torch.equal(w, model.leaf.weight):  # here
        model.leaf.weight.copy_(w)


@refused("RDT201", "parameter leaf.weight")
def asks_the_old_weight(model: Any, w: Tensor) -> None:
    if model.leaf.weight[0, 0].item() == 0:  # here
        model.leaf.weight.copy_(w)


@refused("RDT201", "w -> copy_() into scratch")
def reads_scratch(model: Any, w: Tensor) -> None:
    scratch = torch.zeros(8, 4)
    scratch.copy_(w)
    model.leaf.weight.fill_(scratch[0, 0].item())  # here


@refused("RDT201", "parameter leaf.scale")
def reads_a_written_buffer(model: Any, w: Tensor) -> None:
    if model.leaf.scale[0].item() > 1:  # here
        model.leaf.weight.copy_(w)


@refused("RDT203", "w.[0]")
def broadcasts(model: Any, w: Tensor) -> None:
    model.leaf.weight.data.copy_(w[0])  # here


@refused("RDT203", "w.[0:1]")
def broadcasts_on_assignment(model: Any, w: Tensor) -> None:
    model.leaf.weight[:] = w[0:1]  # here


@refused("RDT203", "w.t()")
def copies_another_shape(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w.t())  # here


@refused("RDT205", "w")
def replaces_data(model: Any, w: Tensor) -> None:
    model.leaf.weight.data = w  # here


@refused("RDT202", "w.[0:2] -> __setitem__()")
def copies_assigned_scratch(model: Any, w: Tensor) -> None:
    scratch = torch.empty_like(w)
    scratch[0:2] = w[0:2]
    model.leaf.weight.copy_(scratch)  # here


@refused("RDT202", "w")
def writes_out(model: Any, w: Tensor) -> None:
    torch.add(w, 1, out=model.leaf.weight)  # here


@refused("RDT202", "w")
def copies_lists(model: Any, w: Tensor) -> None:
    torch._foreach_copy_([model.leaf.weight], [w])  # here


@refused("RDT202", "w")
def calls_an_operator(model: Any, w: Tensor) -> None:
    torch.ops.aten.copy_.default(model.leaf.weight, w)  # here


@refused("RDT202", "w")
def writes_through_an_index(model: Any, w: Tensor) -> None:
    model.leaf.weight.index_copy_(0, torch.arange(8), w)  # here


@refused("RDT202", "w.[0:4]")
def assigns_through_an_index(model: Any, w: Tensor) -> None:
    model.leaf.weight[torch.arange(4)] = w[0:4]  # here


@refused("RDT202", "w.[0:2]")
def assigns_through_a_list(model: Any, w: Tensor) -> None:
    model.leaf.weight[[0, 3]] = w[0:2]  # here


@refused("RDT202", "parameter leaf.weight")
def assigns_through_a_mask(model: Any, w: Tensor) -> None:
    model.leaf.weight[torch.arange(8) > 3] = 0.0  # here


@refused("RDT202", "no source tensor")
def copies_data_of_its_own(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(torch.arange(32).view(8, 4))  # here


@refused("RDT202", "no source tensor")
def copies_zeros_of_both_signs(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(torch.tensor([0.0, -0.0, 0.0, 0.0]).expand(8, 4))  # here


@refused("RDT206", "w.view(torch.int16)")
def writes_through_another_dtype(model: Any, w: Tensor) -> None:
    model.leaf.weight.view(torch.int16).copy_(w.view(torch.int16))  # here


@refused("RDT202", "w -> cumsum()")
def copies_a_running_sum(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w.cumsum(0))  # here


@refused("RDT202", "w -> add()")
def adds_with_a_factor(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(torch.add(w, w, alpha=2))  # here


@refused("RDT202", "w.[0:4] -> __setitem__()")
def leaves_scratch_unset(model: Any, w: Tensor) -> None:
    scratch = torch.empty(8, 4, dtype=torch.bfloat16)
    scratch[0:4] = w[0:4]
    model.leaf.weight.copy_(scratch)  # here


@refused("RDT202", "parameter leaf.weight")
def sorts_a_parameter(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    model.leaf.weight.cumsum_(0)  # here


@refused("RDT209", "parameter leaf.weight -> neg()")
def uses_a_value_too_late(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    negated = -model.leaf.weight
    model.leaf.weight.mul_(2)
    model.leaf.weight.copy_(negated)  # here


@refused("RDT209", "w -> mul()")
def computes_with_another_module(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w * model.other)  # here


@refused("RDT206", "parameter leaf.weight")
def fills_through_another_dtype(model: Any, w: Tensor) -> None:
    model.leaf.weight.view(torch.int16).fill_(1)  # here


@refused("RDT203", "w.[0]")
def hides_the_refusal(model: Any, w: Tensor) -> None:
    try:
        model.leaf.weight.copy_(w[0])  # here
    except Exception:
        model.leaf.weight.copy_(w)


@pytest.mark.parametrize("memory", ["meta", "live"])
@pytest.mark.parametrize(("loader", "code", "chain"), REFUSED, ids=[loader.__name__ for loader, *_ in REFUSED])
def test_refused(loader: Loader, code: str, chain: str, memory: str) -> None:
    """Rule: a loader that needs data, or writes what no plan can express, is refused with the source, the
    chain, the loader and its line; a model with real memory is bit for bit what it was."""
    model = small_model(loader, memory)
    before = snapshot(model) if memory == "live" else {}
    with pytest.raises(TraceError) as refusal:
        trace_model(model, build_manifest(entries()), Position(0, 0, 0))
    message = str(refusal.value)
    assert refusal.value.code == code, message
    assert f"loader {place_of(loader)} " in message
    assert "\n  source: w\n" in message
    assert f"\n  chain: {chain}\n" in message
    if memory == "live":
        assert compare(before, model) == {}
        assert not any(tensor.is_meta for tensor in oracle.held_tensors(model).values())


# -- refused, where no Python call shows it ------------------------------------------------------------------


@torch.jit.script
def negate(x: Tensor) -> Tensor:
    return x.neg_()


def rewrites_by_script(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    negate(model.leaf.weight.data)  # here


def switches_modes_off(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    with torch._C.DisableTorchFunction():
        model.leaf.weight.data.zero_()  # here


def changes_the_source_by_script(model: Any, w: Tensor) -> None:
    negate(w)  # here
    model.leaf.weight.copy_(w)


def hides_a_rewrite(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    with contextlib.suppress(Exception):
        negate(model.leaf.weight.data)  # here


def writes_where_nobody_looks(model: Any, w: Tensor) -> None:
    model.leaf.weight.untyped_storage().copy_(w.untyped_storage())  # here


@pytest.mark.parametrize("memory", ["meta", "live"])
@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (rewrites_by_script, "'leaf.weight'"),
        (switches_modes_off, "'leaf.weight'"),
        (changes_the_source_by_script, "the source 'w'"),
        (hides_a_rewrite, "'leaf.weight'"),
        (writes_where_nobody_looks, "'leaf.weight'"),
    ],
)
def test_a_write_out_of_sight(loader: Loader, name: str, memory: str) -> None:
    """Rule: a parameter that was loaded in sight and rewritten out of it is refused; a live model is what it was."""
    error = refusal_of(loader, memory)
    assert error.code == "RDT230", error.message
    assert f"loader {place_of(loader)} writes {name} by aten." in error.message


# -- refused, where no line of the loader can be named -------------------------------------------------------


def refusal_of(loader: Loader, memory: str = "meta") -> TraceError:
    """The error of the dry run; a live model must be unchanged by it."""
    model = small_model(loader, memory)
    before = snapshot(model) if memory == "live" else {}
    with pytest.raises(TraceError) as refusal:
        trace_model(model, build_manifest(entries()), Position(0, 0, 0))
    assert memory == "meta" or compare(before, model) == {}
    return refusal.value


def test_raising_loader() -> None:
    """Rule: an exception of a loader is reported with the source name, the loader, its line and its words."""

    def raises(model: Any, w: Tensor) -> None:
        model.leaf.weight.copy_(w)
        raise KeyError("no such expert")  # here

    for memory in ("meta", "live"):
        error = refusal_of(raises, memory)
        assert error.code == "RDT207"
        assert f"failed at source name 'w' in {place_of(raises)}: KeyError: 'no such expert'" in str(error)


def test_failing_view() -> None:
    """Rule: a slice that the source does not have is refused where the loader takes it."""

    def slices_too_far(model: Any, w: Tensor) -> None:
        model.leaf.weight.copy_(w.narrow(0, 4, 8))  # here

    error = refusal_of(slices_too_far)
    assert error.code == "RDT207" and f"source name 'w' in {place_of(slices_too_far)}: " in str(error)


def sets_memory(model: Any, w: Tensor) -> None:
    model.leaf.weight.set_(w)  # torch shows this call to nobody


def swaps_tensors(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    torch.utils.swap_tensors(model.leaf.weight, torch.nn.Parameter(w, requires_grad=False))


def replaces_parameter(model: Any, w: Tensor) -> None:
    model.leaf.weight = torch.nn.Parameter(w, requires_grad=False)


def replaces_buffer(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    model.leaf.table = w[:, 0]


def adds_parameter(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    model.leaf.extra = torch.nn.Parameter(w[0], requires_grad=False)


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (sets_memory, "leaf.weight"),
        (swaps_tensors, "leaf.weight"),
        (replaces_parameter, "leaf.weight"),
        (replaces_buffer, "leaf.table"),
        (adds_parameter, "leaf.extra"),
    ],
)
def test_replaced_memory(loader: Loader, name: str) -> None:
    """Rule: a loader that gives the model other tensors is refused: the plan writes into those it had."""
    error = refusal_of(loader)
    assert error.code == "RDT205" and repr(name) in str(error)


def keeps_source(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    model.leaf.first_row = w[0]


def keeps_derived(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    model.leaf.norm = w.float().norm()


def copies_into_attribute(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    model.leaf.cached.copy_(w)


@pytest.mark.parametrize("memory", ["meta", "live"])
@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (keeps_source, "leaf.first_row"),
        (keeps_derived, "leaf.norm"),
        (copies_into_attribute, "leaf.cached"),
    ],
)
def test_source_kept_elsewhere(loader: Loader, name: str, memory: str) -> None:
    """Rule: source data that a loader puts where no plan looks, in a plain attribute, is refused."""
    model = small_model(loader, memory)
    before = snapshot(model) if memory == "live" else {}
    with pytest.raises(TraceError) as refusal:
        trace_model(model, build_manifest(entries()), Position(0, 0, 0))
    assert refusal.value.code == "RDT208" and f" {name}, " in str(refusal.value)
    if memory == "live":
        assert {n: b for n, b in compare(before, model).items() if n in before} == {}


# -- incomplete: recorded, and refused by the proof ----------------------------------------------------------


def writes_half(model: Any, w: Tensor) -> None:
    model.leaf.weight[0:4] = w[0:4]


def writes_twice(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    model.leaf.weight[0:1] = w[3:4]


def computes_over_a_bias(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    model.leaf.bias.copy_(model.leaf.weight[:, 0])


def fetches_over_a_rewrite(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    model.leaf.weight.mul_(2)
    model.leaf.weight[0:2].copy_(w[0:2])


def doubles_what_nobody_wrote(model: Any, w: Tensor) -> None:
    model.leaf.weight[0:4].copy_(w[4:8])
    model.leaf.weight[4:8].copy_(model.leaf.weight[4:8] + w[0:4])


def zeroes_afterwards(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    model.leaf.weight[7].zero_()


def writes_nothing(model: Any, w: Tensor) -> None:
    pass


@pytest.mark.parametrize(
    ("loader", "code", "name"),
    [
        (writes_half, "RDT311", "leaf.weight"),
        (writes_twice, "RDT312", "leaf.weight"),
        (zeroes_afterwards, "RDT312", "leaf.weight"),
        (writes_nothing, "RDT310", "leaf.weight"),
        (computes_over_a_bias, "RDT312", "leaf.bias"),
        (fetches_over_a_rewrite, "RDT312", "leaf.weight"),
        (doubles_what_nobody_wrote, "RDT315", "leaf.weight"),
    ],
)
def test_incomplete(loader: Loader, code: str, name: str) -> None:
    """Rule: what the recorder may see and cannot order, or cannot see at all, never becomes a plan."""
    with pytest.raises(PlanError) as refusal:
        oracle.tiny_plan(small_model(loader, "meta"), entries())
    assert refusal.value.code == code and f"'{name}'" in str(refusal.value)


# -- accepted ------------------------------------------------------------------------------------------------

ACCEPTED: list[tuple[Loader, tuple[int, ...], str, bool]] = []
"""(loader, shape of `w`, dtype of `w`, finite numbers only)."""


def accepted(*shape: int, dtype: str = "bfloat16", finite: bool = False) -> Callable[[Loader], Loader]:
    """`finite`: torch gives NaNs other payloads when it casts them one by one, so a loader that casts columns differs
    in bits that mean nothing.
    """

    def register(loader: Loader) -> Loader:
        ACCEPTED.append((loader, shape or (8, 4), dtype, finite))
        return loader

    return register


@accepted()
def copies(model: Any, w: Tensor) -> None:
    model.leaf.weight.data.copy_(w)


@accepted()
def copies_by_keyword(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(other=w, non_blocking=True)


@accepted()
def assigns(model: Any, w: Tensor) -> None:
    model.leaf.weight[...] = w


@accepted(1, 8, 4)
def assigns_with_a_leading_one(model: Any, w: Tensor) -> None:
    model.leaf.weight[:] = w


@accepted()
def copies_slices_of_data(model: Any, w: Tensor) -> None:
    model.leaf.weight.data[0:3].copy_(w[0:3])
    model.leaf.weight.data[3:].copy_(w[3:])
    model.leaf.weight.data[8:].copy_(w[8:])


@accepted()
def copies_columns(model: Any, w: Tensor) -> None:
    for column in range(4):
        model.leaf.weight[:, column].copy_(w.select(1, 3 - column))


@accepted()
def copies_narrowed(model: Any, w: Tensor) -> None:
    for start in (0, 2, 4, 6):
        model.leaf.weight.narrow(0, start, 2).copy_(torch.narrow(w, 0, 6 - start, 2))


@accepted()
def copies_chunks(model: Any, w: Tensor) -> None:
    upper, lower = w.chunk(2, dim=0)
    model.leaf.weight[4:].copy_(upper)
    model.leaf.weight[:4].copy_(lower)


@accepted()
def copies_by_iteration(model: Any, w: Tensor) -> None:
    for row, (mine, yours) in enumerate(zip(w, w.unbind(), strict=True)):
        model.leaf.weight[row].copy_(mine if row % 2 else yours)


@accepted(4, 8)
def copies_transposed(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w.t())


@accepted(4, 8)
def copies_into_a_transposed_view(model: Any, w: Tensor) -> None:
    model.leaf.weight.T.copy_(w)


@accepted(2, 4, 4)
def copies_permuted(model: Any, w: Tensor) -> None:
    model.leaf.weight.view(4, 2, 4).copy_(w.permute(1, 0, 2))


@accepted(32)
def copies_reshaped(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w.reshape(2, 4, 4).flatten(0, 1).unflatten(0, (8, 1)).squeeze(1))


@accepted(1, 4)
def copies_expanded(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w.expand(8, 4))


@accepted(8, 8, dtype="uint8")
def copies_another_view_of_the_bytes(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w.view(torch.bfloat16))


@accepted(dtype="float32")
def casts_by_copying(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)


@accepted(dtype="float16")
def casts_columns_by_copying(model: Any, w: Tensor) -> None:
    model.leaf.weight.T.copy_(w.t())


@accepted()
def copies_what_is_the_same(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w.detach().contiguous().to(torch.bfloat16).type_as(w).data)


@accepted()
def asks_for_shapes(model: Any, w: Tensor) -> None:
    assert w.shape == model.leaf.weight.shape and w.dtype == torch.bfloat16 and not w.requires_grad
    assert w.numel() == 32 and w.dim() == w.ndim == 2 and len(w) == w.size(0) == 8 and w.is_contiguous()
    model.leaf.weight.copy_(w)


@accepted()
def reads_a_table_of_the_model(model: Any, w: Tensor) -> None:
    for row in range(8):
        if model.leaf.scale.is_meta or model.leaf.table[row].item() == row:
            model.leaf.weight[row].copy_(w[row])


@accepted(6, 4)
def pads_by_fill(model: Any, w: Tensor) -> None:
    model.leaf.weight[:6].copy_(w)
    model.leaf.weight[6:].fill_(1.5)


@accepted(6, 4)
def pads_by_keyword_fill(model: Any, w: Tensor) -> None:
    model.leaf.weight[6:].fill_(value=-3)
    model.leaf.weight[:6].copy_(w)


@accepted(6, 4)
def pads_by_zero(model: Any, w: Tensor) -> None:
    model.leaf.weight.data[6:].zero_()
    model.leaf.weight[:6].copy_(w)


@accepted(6, 4)
def pads_by_init(model: Any, w: Tensor) -> None:
    torch.nn.init.zeros_(model.leaf.weight[6:])
    model.leaf.weight[:6].copy_(w)


@accepted(6, 4)
def pads_by_assignment(model: Any, w: Tensor) -> None:
    model.leaf.weight[:6] = w
    model.leaf.weight[6:] = 0


@accepted(6, 4)
def pads_with_infinity(model: Any, w: Tensor) -> None:
    model.leaf.weight[:6] = w
    model.leaf.weight[6] = float("-inf")
    model.leaf.weight[7] = float("nan")


@accepted(6, 4)
def pads_with_zeros(model: Any, w: Tensor) -> None:
    model.leaf.weight[:6].copy_(w)
    model.leaf.weight[6:].copy_(torch.zeros(2, 4))


@accepted(6, 4)
def pads_with_minus_zero(model: Any, w: Tensor) -> None:
    model.leaf.weight[:6].copy_(w)
    model.leaf.weight[6:] = torch.full((4,), -0.0)


@accepted(6, 4)
def zeroes_before(model: Any, w: Tensor) -> None:
    model.leaf.weight.zero_()
    model.leaf.weight[:6].copy_(w)


@accepted()
def scales_the_source(model: Any, w: Tensor) -> None:
    w.mul_(2)
    model.leaf.weight.copy_(w)


@accepted()
def zeroes_rows_of_the_source(model: Any, w: Tensor) -> None:
    w[0:2].zero_()
    model.leaf.weight.copy_(w)


@accepted()
def assigns_into_the_source(model: Any, w: Tensor) -> None:
    w[0] = 1.0
    model.leaf.weight.copy_(w)


@accepted()
def copies_into_the_source(model: Any, w: Tensor) -> None:
    w[0].copy_(w[1])
    model.leaf.weight.copy_(w)


@accepted()
def copies_a_product(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w * 2)


@accepted()
def copies_a_cast(model: Any, w: Tensor) -> None:
    model.leaf.weight[0:4].copy_(-w[0:4].float())
    model.leaf.weight[4:].copy_(w[4:].abs())


@accepted()
def copies_a_concatenation(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(torch.cat([w[0:4], w[4:8]]))


@accepted()
def copies_a_transposed_clone(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w.t().contiguous().t())


@accepted()
def copies_type_as(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w.type_as(torch.empty(0, dtype=torch.float32, device=w.device)))


@accepted()
def copies_scratch(model: Any, w: Tensor) -> None:
    scratch = torch.empty(8, 4)
    scratch[0:8].copy_(w)
    model.leaf.weight.copy_(scratch)


@accepted()
def rewrites_a_parameter(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    model.leaf.weight.data.copy_(-torch.exp(model.leaf.weight.float()))


@accepted()
def multiplies_a_parameter(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    model.leaf.weight.mul_(2)


@accepted()
def adds_to_a_parameter(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    model.leaf.weight.data += 1


@accepted()
def copies_zeros_without_memory(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(torch.zeros_like(w))
    model.leaf.weight.copy_(w)


@accepted()
def exponentiates_a_slice(model: Any, w: Tensor) -> None:
    model.leaf.weight[:4].copy_(-torch.exp(w.float())[4:])
    model.leaf.weight[4:].copy_((w.float() + 1)[0:4].neg_())


@accepted(dtype="float32")
def computes_with_numbers(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_((2 - w) / 3 * 0.5 + 1 / w.abs())


@accepted()
def computes_with_a_constant(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w * torch.full((4,), 2.0) + torch.tensor(1.0))


@accepted(8, finite=True)
def joins_computed_columns(model: Any, w: Tensor) -> None:
    columns = [w.float().abs().sqrt(), w, w * w, torch.zeros(8)]
    model.leaf.weight.copy_(torch.stack([c.to(torch.float32) for c in columns], dim=1))


@accepted(2, 4)
def repeats_rows(model: Any, w: Tensor) -> None:
    model.leaf.weight[:4].copy_(w.repeat(2, 1))
    model.leaf.weight[4:].copy_(w.repeat_interleave(2, dim=0))


@accepted(6, 3)
def pads_by_operation(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(torch.nn.functional.pad(w, (1, 0, 0, 2), value=0.5))


@accepted(4, 8)
def computes_on_a_transpose(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(-w.t().contiguous())


@accepted(4, 8)
def reads_rows_of_a_transposed_result(model: Any, w: Tensor) -> None:
    negated = -w.t()
    model.leaf.weight[:3].copy_(negated[5:])
    model.leaf.weight[3:].copy_(negated[:5])


@accepted()
def assembles_scratch(model: Any, w: Tensor) -> None:
    scratch = torch.empty(8, 4, dtype=torch.float32)
    scratch[4:] = w[:4]
    scratch[:4] = 1.0
    scratch[0:4].copy_(w[4:8])
    scratch[2:4] = -w[6:8]
    model.leaf.weight.copy_(scratch)


@accepted()
def rewrites_twice(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    model.leaf.weight.add_(1)
    model.leaf.weight.data.copy_(model.leaf.weight.data * model.leaf.weight.data)


@accepted()
def rearranges_itself(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w)
    model.leaf.weight.copy_(model.leaf.weight.view(4, 8).t().contiguous())


@accepted()
def moves_between_devices(model: Any, w: Tensor) -> None:
    model.leaf.weight.copy_(w.cpu().to("cpu", torch.float32).to(device="cpu", dtype=torch.bfloat16))


@accepted()
def changes_a_copy(model: Any, w: Tensor) -> None:
    copied = w.clone()
    copied.mul_(2)
    copied[0].zero_()
    model.leaf.weight[:4].copy_(copied[:4])
    model.leaf.weight[4:].copy_(w[4:])


@accepted()
def uses_what_was_a_source(model: Any, w: Tensor) -> None:
    row = w[7]
    w.neg_()
    model.leaf.weight[1:].copy_(w[:7])
    model.leaf.weight[0].copy_(row)


@accepted()
def rewrites_between_fetches(model: Any, w: Tensor) -> None:
    model.leaf.weight[:4].copy_(w[:4])
    model.leaf.weight[:4].mul_(3)
    model.leaf.weight[4:].copy_(w[4:])


@accepted()
def selects_rows_by_a_table(model: Any, w: Tensor) -> None:
    own = (model.leaf.table % 2 == 1).nonzero().flatten() if not model.leaf.table.is_meta else torch.arange(1, 8, 2)
    own = own.to(w.device)
    model.leaf.weight[:4].copy_(w[own])
    model.leaf.weight[4:].copy_(w[(own - 1).flip(0).to(w.device)])
    assert own[0].item() == 1


@accepted(4, 8)
def selects_rows_of_a_transpose(model: Any, w: Tensor) -> None:
    own = torch.arange(0, 8, 2)
    model.leaf.weight[:2].copy_(w.t()[own][2:])
    model.leaf.weight[2:4].copy_(w.t()[own][:2])
    model.leaf.weight[4:].copy_(w.t()[own + 1])


@accepted(6, 4)
def rewrites_padding(model: Any, w: Tensor) -> None:
    model.leaf.weight[6:].fill_(2.0)
    model.leaf.weight[:6].copy_(w)
    model.leaf.weight.data.copy_(model.leaf.weight + 1)


@pytest.mark.parametrize(
    ("loader", "shape", "dtype", "finite"), ACCEPTED, ids=[loader.__name__ for loader, *_ in ACCEPTED]
)
def test_accepted(loader: Loader, shape: tuple[int, ...], dtype: str, finite: bool) -> None:
    """Rule: slices, constants and what is computed from them by the closed table, however they are spelled, become a
    plan that gives the same bytes."""
    listed = entries(shape, dtype)
    sources = finite_sources(listed) if finite else random_sources(listed)
    stock = small_model(loader, "live")
    oracle.load_stock(stock, sources)
    live = small_model(loader, "live")
    before = snapshot(live)
    plan = oracle.tiny_plan(live, listed)
    assert compare(before, live) == {}, "the dry run changed a live model"
    program = plan.consumers[0].program
    on_meta = oracle.tiny_plan(small_model(loader, "meta"), listed)
    assert repr(program) == repr(on_meta.consumers[0].program)  # a NaN among the constants equals no other
    for way in oracle.WAYS:
        planned = small_model(loader, "live")
        oracle.load_planned(planned, program, plan.manifest, sources, way)
        assert compare(stock, planned) == {}


# -- accepted: unusual models --------------------------------------------------------------------------------


def check_model(build: Callable[[], torch.nn.Module], listed: list[SourceTensor]) -> Any:
    """The program of a model (built anew for every load) whose execution gave stock bytes, both ways."""
    sources = random_sources(listed)
    stock = build()
    oracle.load_stock(stock, sources)
    plan = oracle.tiny_plan(build(), listed)
    for way in oracle.WAYS:
        planned = build()
        oracle.load_planned(planned, plan.consumers[0].program, plan.manifest, sources, way)
        assert compare(stock, planned) == {}
    return plan.consumers[0].program


def load_by_name(model: Any, name: str, tensor: Tensor) -> None:
    """Every source goes to the parameter or buffer of its name."""
    model.get_parameter(name).data.copy_(tensor)


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def test_tied_parameters() -> None:
    """Rule: tied parameters are one storage: written once, and the other name is in the plan."""

    def build() -> torch.nn.Module:
        model = TinyModel(load_by_name)
        model.embed, model.head = torch.nn.Module(), torch.nn.Module()
        model.embed.weight = model.head.weight = parameter(8, 4)
        return model

    program = check_model(build, [SourceTensor("embed.weight", "bfloat16", (8, 4))])
    assert program.parameters.names == ("embed.weight",)
    assert program.parameters.aliases == (("head.weight",),)


def test_parameters_of_one_storage() -> None:
    """Rule: parameters that are pieces of one flat storage are told apart, and written in their places."""

    def build() -> torch.nn.Module:
        model = TinyModel(load_by_name)
        flat = torch.empty(48, dtype=torch.bfloat16)
        model.a = torch.nn.Parameter(flat[4:20].view(4, 4), requires_grad=False)
        model.b = torch.nn.Parameter(flat[20:44].view(4, 6).t(), requires_grad=False)
        return model

    program = check_model(build, [SourceTensor("b", "bfloat16", (6, 4)), SourceTensor("a", "bfloat16", (4, 4))])
    assert program.parameters.names == ("a", "b") and program.parameters.strides == ((4, 1), (1, 6))


def test_scalars_and_many_dtypes() -> None:
    """Rule: scalars, integers, booleans and eight-bit floats are moved like anything else."""
    dtypes = ["float32", "int64", "uint8", "float8_e4m3fn", "float8_e8m0fnu", "float64"]

    def build() -> torch.nn.Module:
        model = TinyModel(load_by_name)
        for dtype in dtypes:
            setattr(model, dtype, parameter(3, 5, dtype=getattr(torch, dtype)))
            setattr(model, f"{dtype}_scalar", parameter(dtype=getattr(torch, dtype)))
        return model

    check_model(
        build,
        [SourceTensor(f"{d}_scalar", d, ()) for d in dtypes] + [SourceTensor(d, d, (3, 5)) for d in dtypes],
    )


def test_collected_sources() -> None:
    """Rule: a loader may collect all sources before it writes; an error still names the right source."""

    class Collecting(TinyModel):
        def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
            for name, tensor in dict(weights).items():
                self.load(self, name, tensor)

    def build() -> torch.nn.Module:
        model = Collecting(load_by_name)
        model.a, model.b = parameter(4), parameter(4)
        return model

    check_model(build, [SourceTensor("a", "bfloat16", (4,)), SourceTensor("b", "bfloat16", (4,))])
    listed = [SourceTensor("a", "bfloat16", (2,)), SourceTensor("b", "bfloat16", (4,))]
    with pytest.raises(TraceError, match="\n  source: a\n  chain: a\n"):
        trace_model(build(), build_manifest(listed), Position(0, 0, 0))


def test_provenance_survives_a_change_of_dtype() -> None:
    """Rule: region and offset of a source read as another dtype count that dtype's elements."""

    def load(model: Any, name: str, tensor: Tensor) -> None:
        halves = tensor.view(torch.bfloat16)
        model.high.copy_(halves[:, 1::2])
        model.low.copy_(halves[1:3, 0::2])
        model.rest.copy_(halves[0::3, 0::2])

    def build() -> torch.nn.Module:
        model = TinyModel(load)
        model.high, model.low, model.rest = parameter(4, 2), parameter(2, 2), parameter(2, 2)
        return model

    program = check_model(build, [SourceTensor("packed", "float32", (4, 2))])
    assert ("view(torch.bfloat16)", "[1:3, 0::2]") in program.provenance.chains
