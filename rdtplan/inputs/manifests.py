"""Manifests, from whatever the user has: safetensors headers, a JSON list, a trainer's WeightSource.

No tensor data is read: a safetensors file begins with the length of its header and the header itself.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from rdtplan.errors import InputError
from rdtplan.ir.dtypes import SAFETENSORS, itemsize
from rdtplan.ir.manifest import Ints, Piece, SourceTensor
from rdtplan.ir.pieces import piece_name

MAX_HEADER_NBYTES = 100 << 20
"""The limit that the safetensors format itself sets."""


def read_manifest(path: str | os.PathLike[str]) -> list[SourceTensor]:
    """Entries from a JSON manifest, a safetensors file, an index, or a checkpoint directory.

    InputError (RDT103 to RDT105) when nothing of the kind is there or it is malformed.
    """
    source = Path(path)
    if source.is_dir():
        return from_checkpoint(source)
    if not source.exists():
        raise InputError(
            f"manifest {source} does not exist",
            fix="name a checkpoint directory or a file that `rdtplan manifest` wrote",
            code="RDT103",
        )
    if source.suffix == ".safetensors":
        return from_safetensors(source)
    if source.name.endswith(".safetensors.index.json"):
        return _from_index(source)
    return from_json(source)


def from_checkpoint(directory: Path) -> list[SourceTensor]:
    """Every tensor of a checkpoint directory: through its index if it has one, else of all its files."""
    indices = sorted(directory.glob("*.safetensors.index.json"))
    if indices:
        return _from_index(indices[0])
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise InputError(
            f"no safetensors file in {directory}",
            fix="name a checkpoint directory, or a JSON manifest",
            code="RDT103",
        )
    return _natural_order([entry for file in files for entry in from_safetensors(file)])


def _from_index(index: Path) -> list[SourceTensor]:
    data = _load_json(index)
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict):
        raise InputError(f"{index} has no 'weight_map' object", code="RDT104")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise InputError(f"{index}: weight_map: {name!r}: expected a file name, found {file!r}", code="RDT104")
    entries = {
        (file, e.name): e for file in sorted(set(weight_map.values())) for e in from_safetensors(index.parent / file)
    }
    for name, file in weight_map.items():
        if (file, name) not in entries:
            raise InputError(
                f"{index} places {name!r} in {file}, whose header does not have it",
                fix="the index and its files are of different checkpoints; download them again",
                code="RDT104",
            )
    return _natural_order([entries[file, name] for name, file in weight_map.items()])


def checkpoint_files(directory: Path) -> dict[str, Path]:
    """The file of each tensor of a checkpoint directory, found and refused as `from_checkpoint` does."""
    from_checkpoint(directory)
    indices = sorted(directory.glob("*.safetensors.index.json"))
    if indices:
        return {name: directory / file for name, file in _load_json(indices[0])["weight_map"].items()}
    found: dict[str, Path] = {}
    for file in sorted(directory.glob("*.safetensors")):
        for entry in from_safetensors(file):
            if entry.name in found:
                raise InputError(
                    f"{directory}: {entry.name!r} is in {found[entry.name].name} and in {file.name}",
                    fix="keep the files of one checkpoint alone in the directory, or give them an index",
                    code="RDT106",
                )
            found[entry.name] = file
    return found


def _natural_order(entries: list[SourceTensor]) -> list[SourceTensor]:
    """Embeddings, then each layer's names together and layers ascending, then the rest (final norm, head).

    Headers and indices are sorted as text (`lm_head` first, layer 10 before 2), which says nothing about the
    model.
    """
    from rdtplan.passes.group_names import group_key

    keys = [group_key(e.name) for e in entries]
    stacks = {prefix: i for i, prefix in enumerate(dict.fromkeys(key[0] for key in keys if key))}

    def rank(i: int) -> tuple[int, int, int, int]:
        key = keys[i]
        if key is None:
            return (0 if _comes_first(entries[i].name) else 2, 0, 0, i)
        return (1, stacks[key[0]], key[1], i)

    return [entries[i] for i in sorted(range(len(entries)), key=rank)]


def _comes_first(name: str) -> bool:
    module = name.rpartition(".")[0].rpartition(".")[2]
    return "embed" in module or module in ("wte", "wpe")


def from_safetensors(path: str | os.PathLike[str]) -> list[SourceTensor]:
    """Entries of one safetensors file, in the order of their data, from its header alone."""
    try:
        with open(path, "rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise InputError(f"{path} is truncated: {len(prefix)} bytes, a header needs 8", code="RDT104")
            (length,) = struct.unpack("<Q", prefix)
            size = os.fstat(file.fileno()).st_size
            if length > MAX_HEADER_NBYTES or length + 8 > size:
                raise InputError(
                    f"{path} is no safetensors file: its header claims {length:,} bytes, the file has {size:,}",
                    code="RDT104",
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", code="RDT103") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: the header is not JSON: {error}", code="RDT104") from None
    if not isinstance(header, dict):
        raise InputError(f"{path}: the header is no object of tensors, found {type(header).__name__}", code="RDT104")
    entries: list[tuple[int, SourceTensor]] = []
    for name, info in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _header_entry(info, f"{path}: header entry {name!r}")
        if end + length + 8 > size:
            raise InputError(
                f"{path} is truncated: {name!r} ends at byte {end + length + 8:,}, the file has {size:,}",
                code="RDT104",
            )
        entries.append((begin, SourceTensor(name, dtype, shape)))
    return [entry for _, entry in sorted(entries, key=lambda e: e[0])]


def _header_entry(info: Any, where: str) -> tuple[str, Ints, int, int]:
    """dtype, shape and data offsets (bytes) of one tensor."""
    missing = [k for k in ("dtype", "shape", "data_offsets") if not isinstance(info, dict) or k not in info]
    if missing:
        raise InputError(f"{where} lacks {missing[0]!r}", code="RDT104")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS:
        raise InputError(f"{where}: dtype: {dtype!r} is none of {', '.join(SAFETENSORS)}", code="RDT104")
    if not _sizes(shape):
        raise InputError(f"{where}: shape: expected an array of sizes, found {shape!r}", code="RDT104")
    if not _sizes(offsets) or len(offsets) != 2:
        raise InputError(f"{where}: data_offsets: expected [begin, end], found {offsets!r}", code="RDT104")
    begin, end = offsets
    nbytes = prod(shape) * itemsize(SAFETENSORS[dtype])
    if end - begin != nbytes:
        raise InputError(f"{where}: data_offsets: {end - begin:,} bytes, {dtype} {shape} has {nbytes:,}", code="RDT104")
    return SAFETENSORS[dtype], tuple(shape), begin, end


def _sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", code="RDT103") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}", code="RDT104") from None


def from_json(path: str | os.PathLike[str]) -> list[SourceTensor]:
    """Entries of a JSON manifest: `[name, dtype, shape]` each, or an object with these keys and `owners` or `pieces`.

    A piece is `[offsets, sizes, ranks]`.
    """
    data = _load_json(Path(path))
    if not isinstance(data, list):
        raise InputError(
            f"{path}: expected an array of [name, dtype, shape], found {type(data).__name__}", code="RDT104"
        )
    return [_json_entry(item, f"{path}: entry {i}") for i, item in enumerate(data)]


def _json_entry(item: Any, where: str) -> SourceTensor:
    owners = None
    if isinstance(item, dict):
        missing = [k for k in ("name", "dtype", "shape") if k not in item]
        if missing:
            raise InputError(f"{where} lacks {missing[0]!r}", code="RDT104")
        name, dtype, shape, owners = item["name"], item["dtype"], item["shape"], item.get("owners")
    elif isinstance(item, list) and len(item) == 3:
        name, dtype, shape = item
    else:
        raise InputError(f"{where} is neither [name, dtype, shape] nor an object: {str(item)[:80]}", code="RDT104")
    if not isinstance(name, str) or not name:
        raise InputError(f"{where}: name: expected a string, found {name!r}", code="RDT104")
    if not isinstance(dtype, str):
        raise InputError(f"{where} ({name}): dtype: expected a string, found {dtype!r}", code="RDT104")
    if not _sizes(shape):
        raise InputError(f"{where} ({name}): shape: expected an array of sizes, found {shape!r}", code="RDT104")
    if owners is not None and not (isinstance(owners, list) and all(type(r) is int for r in owners)):
        raise InputError(f"{where} ({name}): owners: expected an array of ranks, found {owners!r}", code="RDT104")
    dtype = SAFETENSORS.get(dtype, dtype.removeprefix("torch."))
    pieces = _json_pieces(item.get("pieces", []) if isinstance(item, dict) else [], f"{where} ({name})")
    return SourceTensor(name, dtype, tuple(shape), None if owners is None else tuple(sorted(set(owners))), pieces)


def _json_pieces(value: Any, where: str) -> tuple[Piece, ...]:
    if not isinstance(value, list) or not all(
        isinstance(p, list) and len(p) == 3 and all(map(_sizes, p)) for p in value
    ):
        raise InputError(
            f"{where}: pieces: expected an array of [offsets, sizes, ranks], found {str(value)[:80]}", code="RDT104"
        )
    return tuple(Piece(tuple(offsets), tuple(sizes), tuple(ranks)) for offsets, sizes, ranks in value)


def from_weight_source(source: Any) -> list[SourceTensor]:
    """Entries of a live WeightSource, of vLLM 0.32 (`metadata()`) or 0.33 (a property, with owners)."""
    metadata: Any = source.metadata
    rows: Iterable[Any] = metadata() if callable(metadata) else metadata
    entries: list[SourceTensor] = []
    for row in rows:
        owners = getattr(row, "owners", None)
        entries.append(
            SourceTensor(
                row.name,
                str(row.dtype).removeprefix("torch."),
                tuple(int(n) for n in row.shape),
                None if owners is None else tuple(sorted(set(owners))),
                tuple(getattr(row, "pieces", None) or ()),
            )
        )
    return entries


def by_pieces(entries: Iterable[SourceTensor]) -> list[SourceTensor]:
    """Entries as a plan has them: each piece of a sharded tensor in its place, under its own name."""
    found: list[SourceTensor] = []
    for e in entries:
        if not e.pieces:
            found.append(e)
        for piece in e.pieces:
            owners = tuple(sorted(set(piece.ranks)))
            found.append(SourceTensor(piece_name(e.name, e.shape, piece), e.dtype, piece.sizes, owners))
    return found


def to_json(entries: Iterable[SourceTensor]) -> bytes:
    """The JSON manifest of `entries`, one line each."""
    lines = []
    for e in entries:
        row: Any = [e.name, e.dtype, list(e.shape)]
        if e.owners is not None:
            row = {"name": e.name, "dtype": e.dtype, "shape": list(e.shape), "owners": list(e.owners)}
        if e.pieces:
            row = {"name": e.name, "dtype": e.dtype, "shape": list(e.shape)}
            row["pieces"] = [[list(p.offsets), list(p.sizes), list(p.ranks)] for p in e.pieces]
        lines.append(json.dumps(row))
    return ("[\n" + ",\n".join(lines) + "\n]\n").encode()
