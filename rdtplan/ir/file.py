"""The plan on disk: JSON lines. The first line is the seal, every further line one part.

    {"digest": ..., "fields": ..., "format": "1.0", "kind": "rdtplan.fleet-plan", "parts": [...], "plan": ...}
    <part 0>
    <part 1>

The seal holds the plan's root, with `{"$part": i}` where a part stands, and for every part its size and
SHA-256; its own digest, over its canonical bytes without `digest`, is the fleet digest. So the whole is
sealed as a tree, one part is read and verified without the others, and `head -1 plan | jq` works. A part that
occurs twice is stored once.

Long columns are parts too (`rdtplan.ir.columns`), shared by all tables that have them.

Every size is checked against the file before anything is read, and columns expand to at most a fixed number of entries
for every byte of the file, so an impossible plan costs no memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import attrs
import orjson

from rdtplan.errors import PlanFormatError
from rdtplan.ir import compression
from rdtplan.ir.plan import FORMAT, ConsumerPlan, FleetPlan, ProducerPlan, Program
from rdtplan.ir.serialize import PART, Packed, canonical_bytes, first_reason, make_converter
from rdtplan.output import write_whole

T = TypeVar("T")
KIND = "rdtplan.fleet-plan"
MAX_SEAL_NBYTES = 64 << 20
ENTRIES_PER_BYTE = 16
"""Column entries that a file may expand to, for every byte of it; a plan of 72 workers needs less than one."""
FREE_ENTRIES = 1 << 22
"""Column entries that any file may expand to, however small."""
START = b'{"digest":"'
"""What every plan file begins with: the seal is canonical JSON."""
NAME_A_PLAN = "name the file that `rdtplan compile -o` wrote"
RECOMPILE = "compile the plan again, or fetch an undamaged copy"


Migration = Callable[[str, Any], Any]
"""(`plan`, or the kind of a part; its JSON value in one major version) -> the value in the next major version."""
MIGRATIONS: dict[int, Migration] = {}
"""By the major version that a migration reads. docs/plan-format.md says how one is written."""


def _field_digests(value: Any) -> dict[str, str]:
    """Short digests of the fields of an object; they only serve to name the field that was edited."""
    if not isinstance(value, dict):
        return {}
    return {k: hashlib.sha256(canonical_bytes(v)).hexdigest()[:12] for k, v in value.items()}


def _seal_fields(seal: dict[str, Any]) -> dict[str, Any]:
    """What a seal holds, by the path of each field."""
    outer = {k: v for k, v in seal.items() if k not in ("plan", "fields", "digest")}
    plan = seal.get("plan")
    return {**outer, **({f"plan.{k}": v for k, v in plan.items()} if isinstance(plan, dict) else {})}


def encode(plan: FleetPlan) -> tuple[bytes, str]:
    """Canonical bytes of a whole plan file, and the fleet digest."""
    bodies: list[bytes] = []
    entries: list[dict[str, Any]] = []
    index: dict[tuple[str, str], int] = {}
    stored: dict[tuple[str, int], tuple[Any, int]] = {}
    """By kind and id of what is stored, and the value itself, so that no other value can get its id."""

    def store(kind: str, value: Any, t: Any) -> int:
        if (kind, id(value)) not in stored:
            stored[kind, id(value)] = value, place(kind, value, t)
        return stored[kind, id(value)][1]

    def place(kind: str, value: Any, t: Any) -> int:
        plain = converter.unstructure(value, unstructure_as=t)
        body = canonical_bytes(plain)
        digest = hashlib.sha256(body).hexdigest()
        key = (kind, digest)
        if key not in index:
            index[key] = len(bodies)
            bodies.append(body)
            entries.append({"kind": kind, "nbytes": len(body), "sha256": digest, "fields": _field_digests(plain)})
        return index[key]

    converter = make_converter(store=store)
    root = converter.unstructure(plan)
    seal = {"format": FORMAT, "kind": KIND, "plan": root, "parts": entries}
    seal["fields"] = _field_digests(_seal_fields(seal))
    digest = hashlib.sha256(canonical_bytes(seal)).hexdigest()
    return b"\n".join([canonical_bytes({**seal, "digest": digest}), *bodies, b""]), digest


def write_plan(plan: FleetPlan, path: str | os.PathLike[str]) -> str:
    """Write a plan so that a full disk or a crash leaves the old file or none; returns the fleet digest.

    A name that ends in `.zst` makes a compressed file; a symbolic link is followed. PlanFormatError RDT407 when the
    file cannot be written, or when what is there is no file.
    """
    data, digest = encode(plan)
    target = Path(path)
    if target.suffix == compression.SUFFIX:
        data = compression.compress(data, target)
    try:
        write_whole(target, data)
    except OSError as error:
        raise PlanFormatError(
            f"cannot write the plan to {target} ({len(data):,} bytes): {error.strerror}",
            fix="name a file, in a directory that exists, is writable and has room",
            code="RDT407",
        ) from None
    return digest


class PlanFile:
    """A sealed plan on disk, read part by part. Opening verifies the seal, reading a part that part."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """PlanFormatError when the file is missing, truncated, edited, or of an unknown major version."""
        if not os.fspath(path):
            raise PlanFormatError("cannot open a plan: the path is empty", fix=NAME_A_PLAN, code="RDT401")
        self.path = Path(path)
        self._parts: dict[tuple[int, Any], Any] = {}
        self._expanded = 0
        try:
            self._file: BinaryIO = open(self.path, "rb")  # noqa: SIM115 - kept open for the life of the object
        except OSError as error:
            raise PlanFormatError(
                f"cannot open plan {self.path}: {error.strerror}",
                fix=NAME_A_PLAN,
                code="RDT401",
            ) from None
        try:
            self._open()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> None:
        self._file, self.nbytes = compression.plain(self._file, self.path)
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        self._budget = FREE_ENTRIES + ENTRIES_PER_BYTE * size
        line = self._file.readline(MAX_SEAL_NBYTES)
        try:
            seal = _parse(line, f"{self.path}: line 1, the seal")
        except PlanFormatError:
            if line and (line.startswith(START) or START.startswith(line)):
                raise
            what = f"begins with {line[:24]!r}" if line else "is empty"
            raise PlanFormatError(
                f"{self.path} is not a fleet plan: it {what}, a plan begins with {START!r}",
                fix=NAME_A_PLAN,
                code="RDT402",
            ) from None
        if not isinstance(seal, dict) or seal.get("kind") != KIND:
            found = seal.get("kind") if isinstance(seal, dict) else type(seal).__name__
            raise PlanFormatError(
                f"{self.path} is not a fleet plan: expected kind {KIND!r}, found {found!r}",
                fix=NAME_A_PLAN,
                code="RDT402",
            )
        self._migrations = _migrations(self.path, seal.get("format"))
        if not line.endswith(b"\n"):
            raise PlanFormatError(
                f"{self.path} is truncated: the seal ({len(line):,} bytes) has no end of line",
                fix=RECOMPILE,
                code="RDT403",
            )
        canonical = canonical_bytes(seal) + b"\n"
        claimed = seal.pop("digest", None)
        actual = hashlib.sha256(canonical_bytes(seal)).hexdigest()
        if claimed != actual:
            at_field = _edited_field(_seal_fields(seal), seal.get("fields"), "") or " at digest"
            raise PlanFormatError(
                f"{self.path}: the seal was edited{at_field}: "
                f"digest {str(claimed)[:12]} is written, its content has {actual[:12]}",
                fix=RECOMPILE,
                code="RDT405",
            )
        if line != canonical:
            raise PlanFormatError(
                f"{self.path}: the seal was spelled anew: its content is as sealed, its bytes are not",
                fix="copy plans as binary files; " + RECOMPILE,
                code="RDT405",
            )
        self.digest: str = actual
        self.root: dict[str, Any] = self._migrate("plan", self._sealed(seal, "plan", dict))
        self.entries: list[dict[str, Any]] = self._sealed(seal, "parts", list)
        at = len(line)
        self._offsets: list[int] = []
        for i, entry in enumerate(self.entries):
            if type(entry) is not dict or type(entry.get("nbytes")) is not int or entry["nbytes"] < 0:
                raise PlanFormatError(f"{self.path}: parts[{i}].nbytes is not a size", fix=RECOMPILE, code="RDT404")
            self._offsets.append(at)
            at += entry["nbytes"] + 1
            if at > size:
                raise PlanFormatError(
                    f"{self.path} is truncated: part {i} ({entry.get('kind')}) needs the file to have "
                    f"{at:,} bytes, it has {size:,}",
                    fix=RECOMPILE,
                    code="RDT403",
                )
        if at != size:
            raise PlanFormatError(
                f"{self.path}: {size - at:,} bytes follow the last part", fix=RECOMPILE, code="RDT405"
            )

    def _migrate(self, kind: str, plain: Any) -> Any:
        for migration in self._migrations:
            plain = migration(kind, plain)
        return plain

    def _sealed(self, seal: dict[str, Any], name: str, expected: type[T]) -> T:
        value = seal.get(name)
        if not isinstance(value, expected):
            found = "it is missing" if value is None else f"found {type(value).__name__}"
            raise PlanFormatError(
                f"{self.path}: {name}: expected {expected.__name__}, {found}", fix=RECOMPILE, code="RDT404"
            )
        return value

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> PlanFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def part_bytes(self, index: int) -> bytes:
        """Verified bytes of one part."""
        entry = self.entries[index]
        self._file.seek(self._offsets[index])
        body, end = self._file.read(entry["nbytes"]), self._file.read(1)
        actual = hashlib.sha256(body).hexdigest()
        if actual != entry.get("sha256"):
            try:
                plain = orjson.loads(body)
            except orjson.JSONDecodeError:
                plain = None
            raise PlanFormatError(
                f"{self.path}: part {index} ({entry.get('kind')}) was edited"
                f"{_edited_field(plain, entry.get('fields'), str(entry.get('kind')))}: sealed with digest "
                f"{str(entry.get('sha256'))[:12]}, its content has {actual[:12]}",
                fix=RECOMPILE,
                code="RDT405",
            )
        if end != b"\n":
            raise PlanFormatError(
                f"{self.path}: part {index} ({entry.get('kind')}) is followed by {end!r}, not by a line end",
                fix=RECOMPILE,
                code="RDT405",
            )
        return body

    def _fetch(self, index: int, t: Any) -> Any:
        if not 0 <= index < len(self.entries):
            raise PlanFormatError(
                f"{self.path}: reference to part {index}, the file has {len(self.entries)}",
                fix=RECOMPILE,
                code="RDT404",
            )
        key = (index, t)
        if key not in self._parts:
            plain = self._read(index)
            if t is Packed:
                self._spend(plain.get("length") if type(plain) is dict else 0, index)
            self._parts[key] = self._structure(plain, t, f"part {index} ({self.entries[index].get('kind')})")
        elif t is Packed:  # a table of its own may be looked up with these codes
            self._spend(len(self._parts[key]), index)
        return self._parts[key]

    def _spend(self, entries: Any, index: int) -> None:
        """Refuse a column that would take more memory than a file of this size can honestly need."""
        self._expanded += entries if type(entries) is int and entries > 0 else 0
        if self._expanded > self._budget:
            raise PlanFormatError(
                f"{self.path}: part {index} ({self.entries[index].get('kind')}) brings its columns to "
                f"{self._expanded:,} entries, a file of this size may have {self._budget:,}",
                fix=RECOMPILE,
                code="RDT404",
            )

    def _structure(self, plain: Any, t: Any, path: str) -> Any:
        try:
            return self._converter().structure(plain, t)
        except PlanFormatError:
            raise
        except Exception:
            try:
                make_converter(fetch=self._fetch, detailed=True).structure(plain, t)
            except PlanFormatError:
                raise
            except Exception as error:
                name = getattr(t, "__name__", str(t))
                raise PlanFormatError(
                    f"{self.path}: {path}{first_reason(error, name)}", fix=RECOMPILE, code="RDT404"
                ) from None
            raise

    def _converter(self) -> Any:
        if not hasattr(self, "_cached_converter"):
            self._cached_converter = make_converter(fetch=self._fetch)
        return self._cached_converter

    def field(self, name: str) -> Any:
        """One field of FleetPlan, with only the parts it needs."""
        attribute = getattr(attrs.fields(attrs.resolve_types(FleetPlan)), name)
        if name not in self.root:
            raise PlanFormatError(f"{self.path}: plan.{name} is missing", fix=RECOMPILE, code="RDT404")
        if attribute.metadata.get("shared"):
            return self._fetch(self._reference(self.root[name], f"plan.{name}"), attribute.type)
        return self._structure(self.root[name], attribute.type, f"plan.{name}")

    def _reference(self, value: Any, path: str) -> int:
        if type(value) is not dict or type(value.get(PART)) is not int:
            raise PlanFormatError(f"{self.path}: {path} is not a reference to a part", fix=RECOMPILE, code="RDT404")
        return cast(int, value[PART])

    def _one(self, field: str, index: int, cls: type[T]) -> T:
        items = self.root.get(field)
        if type(items) is not list:
            raise PlanFormatError(f"{self.path}: plan.{field} is not an array", fix=RECOMPILE, code="RDT404")
        if not 0 <= index < len(items):
            raise PlanFormatError(
                f"{self.path} has {len(items)} {field}, numbered from 0; there is no {field[:-1]} {index}",
                fix="check the rank of this process against `rdtplan inspect`",
                code="RDT406",
            )
        return cast(T, self._fetch(self._reference(items[index], f"plan.{field}[{index}]"), cls))

    def consumer(self, consumer_id: int) -> ConsumerPlan:
        """One worker's plan; the parts of the others are not read."""
        plan = self._one("consumers", consumer_id, ConsumerPlan)
        if plan.consumer_id != consumer_id:
            raise PlanFormatError(
                f"{self.path}: consumers[{consumer_id}].consumer_id: expected {consumer_id}, found {plan.consumer_id}",
                fix=RECOMPILE,
                code="RDT404",
            )
        return plan

    def table(self, consumer_id: int, name: str) -> Any:
        """One table of a worker's program (`chunks`, `parameters`, ...); the others are not read."""
        items = self.root.get("consumers")
        references = items if type(items) is list else []
        if not 0 <= consumer_id < len(references):
            return getattr(self.consumer(consumer_id).program, name)  # says what is wrong
        value, path = references[consumer_id], f"plan.consumers[{consumer_id}]"
        for field in ("program", name):
            index = self._reference(value, path)
            plain = self._plain(index)
            default = attrs.fields_dict(Program)[name].default if field == name else attrs.NOTHING
            if type(plain) is dict and field not in plain and default is not attrs.NOTHING:
                return default
            value, path = plain.get(field) if type(plain) is dict else None, f"{path}.{field}"
        return self._fetch(self._reference(value, path), attrs.fields_dict(attrs.resolve_types(Program))[name].type)

    def _plain(self, index: int) -> Any:
        """A part as JSON has it, remembered: many workers refer to one program."""
        if not 0 <= index < len(self.entries):
            return None
        key = (index, None)
        if key not in self._parts:
            self._parts[key] = self._read(index)
        return self._parts[key]

    def _read(self, index: int) -> Any:
        """A verified part as JSON has it, in the present major version."""
        plain = _parse(self.part_bytes(index), f"{self.path}: part {index}")
        return self._migrate(str(self.entries[index].get("kind")), plain)

    def producer(self, rank: int) -> ProducerPlan:
        """One trainer rank's plan."""
        plan = self._one("producers", rank, ProducerPlan)
        if plan.rank != rank:
            raise PlanFormatError(
                f"{self.path}: producers[{rank}].rank: expected {rank}, found {plan.rank}",
                fix=RECOMPILE,
                code="RDT404",
            )
        return plan

    def fleet(self) -> FleetPlan:
        """The whole plan; every part is verified, also those that nothing refers to."""
        for index in range(len(self.entries)):
            self.part_bytes(index)
        return cast(FleetPlan, self._structure(self.root, FleetPlan, "plan"))


def _parse(line: bytes, where: str) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        kind = "truncated" if line and not line.endswith(b"\n") else "not JSON"
        raise PlanFormatError(
            f"{where} ({len(line):,} bytes) is {kind}: {str(error)[:80]}", fix=RECOMPILE, code="RDT403"
        ) from None


def _migrations(path: Path, version: Any) -> list[Migration]:
    """What brings a file of this version to the present one; nothing for the same major version."""
    supported = int(FORMAT.split(".")[0])
    text = version.split(".")[0] if isinstance(version, str) else ""
    major = int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else -1
    if major == supported:
        return []
    steps = range(major, supported)
    if not steps or any(step not in MIGRATIONS for step in steps):
        raise PlanFormatError(
            f"{path}: format {version!r} is not readable: this rdtplan reads {supported}.x",
            fix="use the rdtplan that wrote it, or compile the plan again with this one",
            code="RDT408",
        )
    return [MIGRATIONS[step] for step in steps]


def _edited_field(value: Any, digests: Any, path: str) -> str:
    """` at PATH` of the first field whose digest does not fit its content, '' when that cannot be told."""
    if not isinstance(value, dict) or not isinstance(digests, dict):
        return ""
    actual = _field_digests(value)
    for name in [*digests, *(n for n in actual if n not in digests)]:
        if actual.get(name) != digests.get(name):
            return f" at {path}.{name}" if path else f" at {name}"
    return ""
