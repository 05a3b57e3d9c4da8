"""The watched set: every parameter and buffer of all models that a worker holds, by storage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rdtplan.errors import TraceError
from rdtplan.ir.traces import Parameters

DRAFT = "draft."
"""Prefix of a draft model's parameters, and of its source names unless it loads from the model's checkpoint."""


class Watched:
    """All memory that a loader may write, found by storage so that any view of it is recognised.

    Row k describes one storage range; tied and aliased tensors share a row. Parameters come first, in model
    order, then buffers. `tensors[k]` is the tensor itself.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.names: list[str] = []
        self.modules: list[int] = []
        self.module_names: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.dtypes: list[torch.dtype] = []
        self.offsets: list[int] = []
        """Storage offset of the tensor, elements; regions are relative to it."""
        self.kinds: list[str] = []
        self.aliases: list[list[str]] = []
        self.gone: set[int] = set()
        """Rows whose memory the model gave up since, for that of another row."""
        self._passing = {
            f"{path}.{name}".lstrip(".")
            for path, module in model.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }
        self._caches = {path for path, module in model.named_modules(remove_duplicate=False) if _scales_cache(module)}
        self._optional = {
            f"{path}.{name}"
            for path, module in model.named_modules(remove_duplicate=False)
            if hasattr(module, "_loaded_expert_biases")
            for name in ("w13_bias", "w2_bias")
        }
        self._storages: list[torch.UntypedStorage] = []
        """Held, so that no other storage can get the same address."""
        self._of_storage: dict[int, list[tuple[int, int, int]]] = {}
        module_ids: dict[str, int] = {}
        for kind, found in (
            ("parameter", model.named_parameters(remove_duplicate=False)),
            ("buffer", model.named_buffers(remove_duplicate=False)),
        ):
            for name, tensor in found:
                self._add(kind, name, tensor, module_ids)
        self.module_names = list(module_ids)

    def _add(self, kind: str, name: str, tensor: torch.Tensor, module_ids: dict[str, int]) -> None:
        size = tensor.element_size()
        lo = tensor.storage_offset() * size
        hi = lo + _span(tensor) * size
        storage = tensor.untyped_storage()
        rows = self._of_storage.setdefault(storage._cdata, [])
        for a, b, row in rows:
            if a == lo and b == hi:
                self.aliases[row].append(name)
                return
        rows.append((lo, hi, len(self.names)))
        self.names.append(name)
        self.modules.append(module_ids.setdefault(name.rpartition(".")[0], len(module_ids)))
        self.tensors.append(tensor)
        self._storages.append(storage)
        self.dtypes.append(tensor.dtype)
        self.offsets.append(tensor.storage_offset())
        self.kinds.append(kind)
        self.aliases.append([])

    def find(self, t: torch.Tensor) -> int | None:
        """The row whose memory `t` is a view of, None when it is of none."""
        rows = self._of_storage.get(t.untyped_storage()._cdata)
        if rows is None:
            return None
        if len(rows) == 1:
            return rows[0][2]
        at = t.storage_offset() * t.element_size()
        return next((row for lo, hi, row in rows if lo <= at < hi), None)

    def reason(self, name: str) -> str:
        """Why a tensor that no loader writes may stay as it is."""
        if name in self._passing:
            return "the model computes it; no checkpoint holds this buffer"
        return "no loader writes this buffer; it keeps what the model made"

    def follow(self, model: torch.nn.Module) -> None:
        """Take note of what shares memory now, and of what is no longer there."""
        now = Watched(model)
        for row, tensor in enumerate(self.tensors):
            found = now.find(tensor)
            if found is None:
                self.gone.add(row)
            else:
                self.aliases[row] = now.aliases[found]

    def may_stay(self, row: int) -> str | None:
        """Why a parameter that no loader writes needs no writing; None when it does."""
        if self.names[row].rpartition(".")[0] in self._caches:
            return "vLLM sets the scales of a KV cache by itself where the checkpoint has none"
        if self.names[row] in self._optional:
            return "vLLM drops the biases of experts where the checkpoint has none"
        return None

    def placed(self) -> dict[str, tuple[int, int]]:
        """Name -> (storage, storage offset): the same before and after a load that replaces no memory."""
        places = zip(self._storages, self.offsets, strict=True)
        return {name: (storage._cdata, at) for name, (storage, at) in zip(self.names, places, strict=True)}

    def table(self, touched: set[int]) -> tuple[Parameters, tuple[str, ...], dict[int, int]]:
        """(columns, names of buffers left out, row -> column index).

        A buffer that no loader writes is the model's own affair (a rotary table, say); it is named, and
        kept out of the geometry that a live model is held to.
        """
        held = [k for k in range(len(self.kinds)) if k not in self.gone]
        keep = [k for k in held if self.kinds[k] == "parameter" or k in touched]
        kept = set(keep)
        left_out = tuple(self.names[k] for k in held if k not in kept)
        modules: dict[int, int] = {}
        for k in keep:
            modules.setdefault(self.modules[k], len(modules))
        table = Parameters(
            names=tuple(self.names[k] for k in keep),
            modules=tuple(modules[self.modules[k]] for k in keep),
            dtypes=tuple(dtype_name(self.dtypes[k]) for k in keep),
            shapes=tuple(tuple(self.tensors[k].shape) for k in keep),
            strides=tuple(tuple(self.tensors[k].stride()) for k in keep),
            kinds=tuple(self.kinds[k] for k in keep),
            aliases=tuple(tuple(sorted(self.aliases[k])) for k in keep),
            module_names=tuple(self.module_names[m] for m in modules),
        )
        return table, left_out, {k: i for i, k in enumerate(keep)}


def has_draft_model(vllm_config: Any, stage: int) -> bool:
    """Does a worker of this pipeline stage hold a second model? vLLM has it on the last one.

    An n-gram or suffix drafter has no weights.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in ("ngram", "ngram_gpu", "suffix"):
        return False
    return stage == vllm_config.parallel_config.pipeline_parallel_size - 1


def together(model: torch.nn.Module, draft: torch.nn.Module) -> torch.nn.Module:
    """All that a worker holds as one module: the model's names as they are, the draft model's behind `draft.`.

    Neither is changed. TraceError RDT218 for a model that has tensors of its own beside its modules.
    """
    if model._parameters or model._buffers or DRAFT.rstrip(".") in model._modules:
        raise TraceError(
            f"{type(model).__name__} has tensors beside its modules, or a module called 'draft': "
            "a draft model cannot be told apart from it",
            fix="compile without --speculative-config; the draft model then keeps the weights that it started with",
            code="RDT218",
        )
    both = torch.nn.Module()
    both.__dict__.update({k: v for k, v in vars(model).items() if k not in vars(both)})
    both._modules = {**model._modules, DRAFT.rstrip("."): draft}
    return both


def layers_of_experts(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name of the leaf module that holds the experts, vLLM's layer around it), for all that take part in EPLB."""
    for path, layer in model.named_modules():
        if getattr(layer, "routed_experts", None) is not None and getattr(layer, "eplb_state", None) is not None:
            yield f"{path}.routed_experts", layer


def _scales_cache(module: torch.nn.Module) -> bool:
    """Does this module hold parameters for the scales of a KV cache, and nothing else?"""
    method = getattr(module, "quant_method", None)
    return any(kind.__name__ == "BaseKVCacheMethod" for kind in type(method).__mro__)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _span(t: torch.Tensor) -> int:
    if t.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
