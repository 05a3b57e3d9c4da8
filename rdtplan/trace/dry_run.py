"""The dry run: vLLM's own `load_weights` over meta tensors, for one rank or a whole deployment."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import accumulate
from math import prod
from typing import Any

import torch
from attrs import frozen

from rdtplan.errors import RdtError, TraceError
from rdtplan.ir.manifest import Manifest
from rdtplan.ir.operations import Leaves, Operations
from rdtplan.ir.plan import ModelIdentity
from rdtplan.ir.regions import Region, canonical, contiguous_stride, cover
from rdtplan.ir.targets import AUTO
from rdtplan.ir.topology import InferenceTopology, Position, positions
from rdtplan.ir.traces import Fetches, Fills, Parameters, RankTrace, distinct_traces
from rdtplan.trace.draft import Draft, draft_of
from rdtplan.trace.experts import find_experts
from rdtplan.trace.model import ZEROED, build_model, engine_config, model_identity, read_config
from rdtplan.trace.parent import end_with_parent
from rdtplan.trace.platform import live_target, without_devices
from rdtplan.trace.ranks import simulated_rank
from rdtplan.trace.recorder import Operand, Recorder, is_machinery, place
from rdtplan.trace.unseen import UnseenWrites
from rdtplan.trace.watch import Watched, dtype_name, together


def meta_sources(manifest: Manifest) -> list[torch.Tensor]:
    """One meta tensor for every source name: shape and dtype, no memory."""
    dtypes = [getattr(torch, name) for name in manifest.dtype_table]
    templates: dict[tuple[int, int], torch.Tensor] = {}
    for kind in set(zip(manifest.shapes, manifest.dtypes, strict=True)):
        templates[kind] = torch.empty(manifest.shape_table[kind[0]], dtype=dtypes[kind[1]], device="meta")
    return [templates[kind].clone() for kind in zip(manifest.shapes, manifest.dtypes, strict=True)]


def trace_model(
    model: torch.nn.Module,
    manifest: Manifest,
    position: Position,
    *,
    sources: Sequence[torch.Tensor] | None = None,
    provenance: bool = True,
    draft: Draft | None = None,
    unseen: bool = True,
) -> RankTrace:
    """Run `model.load_weights` on stand-ins for every source name and return what it would have written.

    The model is left exactly as it was: writes are recorded and not executed. TraceError when a loader
    needs data, writes something that is no slice of a source, or fails. Without `provenance` the trace has no
    op chains and takes about a fifth less time; without `unseen` it takes half the time, and writes that no Python call
    shows are not looked for. `draft` is loaded after the model, and shares with it afterwards.
    """
    with _no_collection():
        return _trace(model, manifest, position, sources or meta_sources(manifest), provenance, draft, unseen)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage collection off: a trace makes no cycles, and what vLLM has imported is much to walk."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _trace(
    model: torch.nn.Module,
    manifest: Manifest,
    position: Position,
    sources: Sequence[torch.Tensor],
    provenance: bool,
    draft: Draft | None,
    look_for_unseen: bool,
) -> RankTrace:
    whole = model if draft is None else together(model, draft.model)
    watched = Watched(whole)
    recorder = Recorder(manifest, sources, watched, provenance=provenance)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in zip(manifest.names, sources, strict=True):
            recorder.current = name
            yield name, tensor

    unseen = UnseenWrites(recorder.guarded, _loader_of)
    try:
        with unseen if look_for_unseen else contextlib.nullcontext(), recorder, without_devices():
            if draft is None:
                model.load_weights(weights())  # type: ignore[operator]
            else:
                draft.load(model, weights)
        refused = recorder.refused or unseen.refused
        if refused is not None:  # the loader caught it
            raise refused
        _check_model_kept(whole, watched, recorder)
        if draft is not None:
            draft.share(model)
            watched.follow(whole)
        return _to_trace(recorder, watched, position, whole)
    except RdtError:
        raise
    except Exception as error:
        raise (
            recorder.refused
            or unseen.refused
            or TraceError(
                f"load_weights of {type(model).__name__} failed at source name {recorder.current!r} "
                f"in {_raised_in(error)}: {type(error).__name__}: "
                f"{(str(error) or repr(error)).splitlines()[0][:300]}",
                fix="the manifest must name what a checkpoint of this architecture holds; "
                "compare it with the model's config",
                code="RDT207",
            )
        ) from error
    finally:
        for tensor in sources:
            tensor.__dict__.clear()


def _loader_of(frame: Any) -> str:
    """The innermost loader code of a call."""
    while frame.f_back is not None and is_machinery(frame.f_code):
        frame = frame.f_back
    return place(frame.f_code, frame.f_lineno)


def _raised_in(error: Exception) -> str:
    """The innermost loader code of a traceback."""
    found = "unknown code"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not is_machinery(frame.f_code) and frame.f_code.co_filename != __file__:
            found = place(frame.f_code, line)
    return found


def _check_model_kept(model: torch.nn.Module, watched: Watched, recorder: Recorder) -> None:
    """The plan writes into the tensors that the model had. TraceError when a loader replaced them, or keeps
    sources where no plan would put them."""
    loader = f"load_weights of {type(model).__name__}"
    before, after = watched.placed(), Watched(model).placed()
    for name in (*before, *after):
        if before.get(name) != after.get(name):
            kept = "replaces the memory of" if name in after else "removes"
            raise TraceError(
                f"{loader} {kept if name in before else 'adds'} {name!r}",
                fix="this loader cannot be compiled yet; load this model by a full broadcast",
                code="RDT205",
            )
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            words = recorder.kept(value) if isinstance(value, torch.Tensor) else None
            if words is not None:
                raise TraceError(
                    f"{loader} keeps source data in {f'{path}.{name}'.lstrip('.')}, which is neither "
                    f"a parameter nor a buffer\n  chain: {words}",
                    fix="this loader cannot be compiled yet; load this model by a full broadcast",
                    code="RDT208",
                )


def _to_trace(recorder: Recorder, watched: Watched, position: Position, whole: torch.nn.Module) -> RankTrace:
    shared = _drop_gone(recorder, watched.gone)
    overwritten = _drop_overwritten(recorder, watched)
    _fill_padding(recorder, watched)
    touched = {row[3] for row in recorder.fetches} | {row[0] for row in recorder.fills}
    touched |= {operation.parameter for operation in recorder.operations}
    left = (k for k in range(len(watched.names)) if k not in touched and k not in watched.gone)
    reasons = ((watched.names[k], watched.may_stay(k)) for k in left)
    kept = [(name, why) for name, why in reasons if why is not None]
    parameters, untouched, index = watched.table({row for row in touched if row >= 0})
    operands = [operand for _, operand in recorder.operands.values()]
    index.update((-1 - number, len(parameters) + number) for number in range(len(operands)))
    parameters = _with_operands(parameters, operands, index)
    fetches = [(*row[:3], index[row[3]], *row[4:]) for row in recorder.fetches]
    fills = [(index[row[0]], *row[1:4]) for row in recorder.fills]
    operations, leaves = _operation_tables(recorder, index)
    return RankTrace(
        position=position,
        experts=find_experts(whole, watched, index),
        parameters=parameters,
        regions=tuple(recorder.regions),
        dtype_table=tuple(dtype_name(d) for d in recorder.dtypes),
        loaders=tuple(recorder.loaders),
        chains=tuple(recorder.chains),
        fetches=Fetches(*zip(*fetches, strict=True)) if fetches else Fetches((), (), (), (), (), (), ()),
        fills=Fills(*zip(*fills, strict=True)) if fills else Fills((), (), (), ()),
        fill_loaders=tuple(row[4] for row in recorder.fills),
        untouched=untouched,
        untouched_reasons=tuple(watched.reason(name) for name in untouched),
        kept=tuple(name for name, _ in kept),
        kept_reasons=tuple(why for _, why in kept),
        shared=shared,
        overwritten=overwritten,
        operations=operations,
        leaves=leaves,
        expressions=tuple(recorder.expressions),
        operation_loaders=tuple(operation.loader for operation in recorder.operations),
    )


def _drop_overwritten(recorder: Recorder, watched: Watched) -> tuple[tuple[int, int], ...]:
    """Forget scalars that a later write replaces; returns (source, the one after it).

    Fused layers load the input scales and the shape vectors of their parts into one place, and the last one stays.
    Only whole tensors of at most two elements count: more is a weight, which must not be lost.
    """
    manifest = recorder.manifest
    small = [prod(shape) <= _FEW for shape in manifest.shape_table]
    last: dict[tuple[int, int], tuple[int, ...]] = {}
    before: list[tuple[int, int, int]] = []
    for row in recorder.fetches:
        if row[3] >= 0 and small[manifest.shapes[row[0]]]:
            place = (row[3], row[4])
            if place in last and last[place][0] != row[0]:
                before.append((last[place][0], *place))
            last[place] = row
    if not before:
        return ()
    recorder.fetches = [row for row in recorder.fetches if last.get((row[3], row[4]), row) is row]
    used = {row[0] for row in recorder.fetches}
    lost = {source: last[parameter, where][0] for source, parameter, where in before if source not in used}
    return tuple(lost.items())


_FEW = 2
"""Elements."""


def _fill_padding(recorder: Recorder, watched: Watched) -> None:
    """A parameter that was made of zeros, and is written only in part, is filled with zeros first."""
    regions = list(recorder.regions)
    written: dict[int, list[Region]] = {}
    writes = [
        *((row[3], row[4]) for row in recorder.fetches),
        *((row[0], row[1]) for row in recorder.fills),
        *((operation.parameter, operation.region) for operation in recorder.operations),
    ]
    for parameter, region in writes:
        if parameter >= 0 and getattr(watched.tensors[parameter], ZEROED, False):
            written.setdefault(parameter, []).append(regions[region])
    known: dict[tuple[Region, tuple[Region, ...]], bool] = {}
    for parameter, found in written.items():
        tensor = watched.tensors[parameter]
        question = (canonical(tensor.shape, tensor.stride(), 0), tuple(found))
        if question not in known:
            known[question] = bool(cover(*question).missing)
        if known[question]:
            whole = recorder.regions.setdefault(question[0], len(recorder.regions))
            loader = recorder.loaders.setdefault(_MADE, len(recorder.loaders))
            recorder.fills.insert(0, (parameter, whole, 0.0, 1, loader))


_MADE = "the layer's own zeros"


def _drop_gone(recorder: Recorder, gone: set[int]) -> tuple[int, ...]:
    """Forget writes into memory that is no longer there; returns the sources that go nowhere else."""
    if not gone:
        return ()
    lost = {row[0] for row in recorder.fetches if row[3] in gone}
    recorder.fetches = [row for row in recorder.fetches if row[3] not in gone]
    recorder.fills = [row for row in recorder.fills if row[0] not in gone]
    recorder.operations = [operation for operation in recorder.operations if operation.parameter not in gone]
    return tuple(sorted(lost - {row[0] for row in recorder.fetches}))


def _with_operands(parameters: Parameters, operands: list[Operand], index: dict[int, int]) -> Parameters:
    """The table with a row for every operand, named after the parameter that it is fetched for."""
    if not operands:
        return parameters
    fed = [index[operand.row] for operand in operands]
    seen: dict[int, int] = {}
    names: list[str] = []
    for row in fed:
        names.append(f"{parameters.names[row]}#{seen.setdefault(row, 0)}")
        seen[row] += 1
    shapes = tuple(operand.shape for operand in operands)
    return Parameters(
        names=(*parameters.names, *names),
        modules=(*parameters.modules, *(parameters.modules[row] for row in fed)),
        dtypes=(*parameters.dtypes, *(dtype_name(operand.dtype) for operand in operands)),
        shapes=(*parameters.shapes, *shapes),
        strides=(*parameters.strides, *(contiguous_stride(shape) for shape in shapes)),
        kinds=(*parameters.kinds, *("operand" for _ in operands)),
        aliases=(*parameters.aliases, *(() for _ in operands)),
        module_names=parameters.module_names,
    )


def _operation_tables(recorder: Recorder, index: dict[int, int]) -> tuple[Operations, Leaves]:
    operations = recorder.operations
    leaves = [(index[row], region) for operation in operations for row, region in operation.leaves]
    ends = tuple(accumulate(len(operation.leaves) for operation in operations))
    return (
        Operations(
            tuple(index[operation.parameter] for operation in operations),
            tuple(operation.region for operation in operations),
            tuple(operation.expression for operation in operations),
            ends,
        ),
        Leaves(tuple(row for row, _ in leaves), tuple(region for _, region in leaves)),
    )


@frozen
class TraceRequest:
    """Everything that a tracing process must know."""

    config_dir: str
    manifest: Manifest
    topology: InferenceTopology
    dtype: str = "auto"
    quantization: str | None = None
    target: str = AUTO
    speculative: Mapping[str, Any] | None = None
    """vLLM's speculative config: the workers hold a draft model too."""


@frozen
class FleetTrace:
    """The dry run of a whole deployment, and what it ran on."""

    traces: tuple[RankTrace, ...]
    """Distinct ones."""
    trace_of: tuple[int, ...]
    """A worker of one replica: index into `traces`."""
    model: ModelIdentity
    config: dict[str, Any]
    """The model's `config.json`."""
    target: str
    vllm: str
    torch: str
    """Versions."""


def _engine_config(request: TraceRequest, position: Position) -> Any:
    return engine_config(
        request.config_dir,
        request.topology,
        position,
        dtype=request.dtype,
        quantization=request.quantization,
        speculative=request.speculative,
    )


def trace_position(request: TraceRequest, position: Position) -> tuple[RankTrace, ModelIdentity]:
    """Simulate one rank, build its model on meta, and trace it."""
    vllm_config = _engine_config(request, position)
    with simulated_rank(vllm_config, request.topology, position):
        from vllm.config import set_current_vllm_config

        model = build_model(vllm_config, meta=True)
        draft = draft_of(vllm_config, position, meta=True)
        with set_current_vllm_config(vllm_config):
            # Ranks of a stage run the same loaders: one of them is enough to see what they do out of sight.
            unseen = position.dp == position.tp == 0
            trace = trace_model(model, request.manifest, position, draft=draft, unseen=unseen)
    return trace, model_identity(request.config_dir, vllm_config)


def trace_fleet(
    request: TraceRequest, *, jobs: int | None = None, progress: Callable[[int, int], None] | None = None
) -> FleetTrace:
    """Trace every distinct position of one replica, for the target of this process.

    Data-parallel ranks of a dense model are copies and traced once; of a mixture of experts each is traced,
    since vLLM spreads experts over them. Work is spread over `jobs` forked processes (default: the cores,
    at most 4), after vLLM was imported once. `progress(done, total)` is called as traces arrive.
    """
    all_positions = positions(request.topology)
    first = _engine_config(request, all_positions[0])
    spread = request.topology.data_parallel > 1 and not first.model_config.is_moe
    wanted = [p for p in all_positions if not (spread and p.dp)]
    jobs = min(jobs or min(4, len(os.sched_getaffinity(0))), len(wanted))
    if progress:
        progress(0, len(wanted))
    results: dict[Position, tuple[RankTrace, ModelIdentity]] = {}
    for position, result in _run(request, wanted, jobs):
        results[position] = result
        if progress:
            progress(len(results), len(wanted))
    traces, trace_of = distinct_traces([results[Position(0, p.pp, p.tp) if spread else p][0] for p in all_positions])
    import vllm

    return FleetTrace(
        traces=traces,
        trace_of=trace_of,
        model=results[wanted[0]][1],
        config=read_config(request.config_dir),
        target=live_target(),
        vllm=vllm.__version__,
        torch=torch.__version__.split("+")[0],
    )


def _run(
    request: TraceRequest, wanted: list[Position], jobs: int
) -> Iterator[tuple[Position, tuple[RankTrace, ModelIdentity]]]:
    if jobs <= 1:
        for position in wanted:
            yield position, trace_position(request, position)
        return
    context = multiprocessing.get_context("fork")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_one_thread, initargs=(request,)) as pool:
        futures = {pool.submit(_trace_in_child, position): position for position in wanted}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()  # or the end of this process would wait for the traces under way
            raise


_request: TraceRequest | None = None


def _one_thread(request: TraceRequest) -> None:
    global _request
    _request = request
    end_with_parent()
    torch.set_num_threads(1)
    gc.disable()  # a child lives for a few traces, and what vLLM imported is much to walk


def _trace_in_child(position: Position) -> tuple[RankTrace, ModelIdentity]:
    assert _request is not None
    return trace_position(_request, position)
