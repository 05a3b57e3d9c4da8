"""Weights of a sharded safetensors directory, read name by name: no full model in memory.

A file is mapped from the first of its names that a sync asks for until the next sync. Replace a checkpoint by another
directory, or by renaming files over the old ones; a file that is rewritten in place changes under the reader.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rdtexec.sources.base import ParamMeta, Source, not_held
from rdtplan.errors import InputError, PlanMismatch, TransferError
from rdtplan.inputs.manifests import checkpoint_files, from_checkpoint


class CheckpointSource(Source):
    """A checkpoint directory, alone (`ranks=1`) or split by file over the ranks of a trainer."""

    def __init__(self, directory: str | os.PathLike[str], *, rank: int = 0, ranks: int = 1) -> None:
        """InputError RDT103 to RDT106 when it is no sound checkpoint, RDT114 when it has fewer files than `ranks`."""
        self.directory = Path(directory)
        self._ranks = ranks
        self._files = checkpoint_files(self.directory)
        self._open: dict[Path, Any] = {}
        owner = _owner_of_files(self.directory, set(self._files.values()), ranks)
        entries = [
            ParamMeta(e.name, getattr(torch, e.dtype), e.shape, owner[self._files[e.name].name])
            for e in from_checkpoint(self.directory)
        ]
        super().__init__(entries, rank)
        self._planned = {m.name: m for m in self.metadata}

    def use(self, directory: str | os.PathLike[str]) -> None:
        """Change to another checkpoint of the same model, with the same names in files of the same names.

        PlanMismatch RDT503 names the first weight that differs; the source then stays with the old one.
        """
        other = Path(directory)
        files = checkpoint_files(other)
        if self._ranks > 1:
            moved = next((n for n in files if n in self._files and files[n].name != self._files[n].name), None)
            if moved is not None:
                raise PlanMismatch(
                    f"{other} has {moved!r} in {files[moved].name}, the checkpoint before in {self._files[moved].name}",
                    fix="a checkpoint that is split over trainer ranks must keep its files; make a new source and plan",
                    code="RDT503",
                )
        found = {e.name: (e.dtype, e.shape) for e in from_checkpoint(other)}
        planned = {m.name: (str(m.dtype).removeprefix("torch."), m.shape) for m in self.metadata}
        for name in planned | found:
            if planned.get(name) != found.get(name):
                now, before = _text(found.get(name)), _text(planned.get(name))
                raise PlanMismatch(
                    f"{other}: {name!r} is {now}, in the checkpoint before {before}",
                    fix="name a checkpoint of the same model",
                    code="RDT503",
                )
        self.directory, self._files = other, files
        self.start()

    def start(self) -> None:
        """Let go of files that may have been replaced since."""
        self._open.clear()

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            if name not in self._planned or self.rank not in (self._planned[name].owners or (self.rank,)):
                raise not_held(name, self.rank)
            yield name, self._read(name)

    def _read(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        path, planned = self._files[name], self._planned[name]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, "pt")
            tensor: torch.Tensor = self._open[path].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise TransferError(
                f"{path}: {name!r} cannot be read: {error}", fix="give a complete checkpoint", code="RDT607"
            ) from None
        if (tensor.dtype, tuple(tensor.shape)) != (planned.dtype, planned.shape):
            raise TransferError(
                f"{path}: {name!r} is {tensor.dtype} {tuple(tensor.shape)}, it was {planned.dtype} {planned.shape} "
                "when the source was made",
                fix="replace a checkpoint by one of the same model only",
                code="RDT607",
            )
        return tensor


def _owner_of_files(directory: Path, files: set[Path], ranks: int) -> dict[str, tuple[int, ...] | None]:
    """Owners by file name: runs of files in the order of their names, as even as can be."""
    names = sorted(path.name for path in files)
    if ranks == 1:
        return dict.fromkeys(names)
    if len(names) < ranks:
        raise InputError(
            f"{directory} has {len(names)} safetensors files, which cannot be split over {ranks} trainer ranks",
            fix=f"use at most {len(names)} ranks, or save the checkpoint in smaller files",
            code="RDT114",
        )
    return {name: (i * ranks // len(names),) for i, name in enumerate(names)}


def _text(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "not there" if entry is None else f"{entry[0]} {entry[1]}"
