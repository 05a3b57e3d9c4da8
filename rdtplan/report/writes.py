"""One recorded copy in words, and many of them folded: over workers, over experts.

A fold is textual and exact: lines that differ only in numbers that count up evenly become one line with a letter, where
the letter counts the members of the line from 0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import evolve, frozen

from rdtplan.ir.manifest import Manifest
from rdtplan.ir.plan import ConsumerPlan, Program
from rdtplan.ir.regions import contiguous_stride
from rdtplan.report.boxes import region_text
from rdtplan.report.names import indices, template

_NUMBER = re.compile(r"(\d+)")


@frozen(slots=True)
class Write:
    """The slice of one source that lands in one place of one worker's model."""

    worker: int
    producer: int
    chunk: int
    source: str
    slice: str
    """Index expression of the source tensor."""
    parameter: str
    destination: str
    """Index expression of the parameter."""
    nbytes: int
    chain: tuple[str, ...]
    loader: str


def describe(consumer: ConsumerPlan, manifest: Manifest, scatters: Iterable[int]) -> list[Write]:
    """The given scatters of one worker, in words."""
    program, routing = consumer.program, consumer.routing
    chunk_of = _chunks_of(program, scatters)
    cache: dict[Any, str] = {}
    out: list[Write] = []
    p, origin, keys = program.parameters, program.provenance, program.keys
    for s, chunk in chunk_of:
        k = program.scatters.key[s]
        source, dtype, parameter = keys.source[k], program.dtype_table[keys.dtype[k]], program.scatters.parameter[s]
        shape, dest = manifest.shape(source), p.shapes[parameter]
        region, target = keys.region[k], program.scatters.region[s]
        if (region, shape, dtype) not in cache:
            text = region_text(program.regions[region], shape, contiguous_stride(shape))
            retyped = "" if dtype == manifest.dtype(source) else f" as {dtype}"
            cache[region, shape, dtype] = text + retyped
        if (target, parameter) not in cache:
            cache[target, parameter] = region_text(program.regions[target], dest, p.strides[parameter])
        out.append(
            Write(
                worker=consumer.consumer_id,
                producer=routing.producer[chunk],
                chunk=chunk,
                source=manifest.names[source],
                slice=cache[region, shape, dtype],
                parameter=p.names[parameter],
                destination=cache[target, parameter],
                nbytes=nbytes_of(program, k),
                chain=origin.chains[origin.scatter_chain[s]],
                loader=origin.loaders[origin.scatter_loader[s]],
            )
        )
    return out


def nbytes_of(program: Program, key: int) -> int:
    """Bytes of one FetchKey."""
    from rdtplan.ir.dtypes import itemsize

    return program.regions[program.keys.region[key]].numel * itemsize(program.dtype_table[program.keys.dtype[key]])


def _chunks_of(program: Program, scatters: Iterable[int]) -> list[tuple[int, int]]:
    """(scatter, its chunk)."""
    from bisect import bisect_right

    ends = program.chunks.scatter_end
    return [(s, bisect_right(ends, s)) for s in scatters]


_WORDS = (
    (re.compile(r"narrow\((-?\d+), (\d+), (\d+)\)"), lambda m: f"take {m[2]}:{int(m[2]) + int(m[3])} of dim {m[1]}"),
    (re.compile(r"select\((-?\d+), (\d+)\)"), lambda m: f"take index {m[2]} of dim {m[1]}"),
    (re.compile(r"unsqueeze\((-?\d+)\)"), lambda m: f"add a dim at {m[1]}"),
    (re.compile(r"unbind\((-?\d*)\)\[(\d+)\]"), lambda m: f"take index {m[2]} of dim {m[1] or 0}"),
    (re.compile(r"(?:t\(\)|transpose\((-?\d+), (-?\d+)\))"), lambda m: "transpose"),
    (re.compile(r"(?:view|reshape)\((.*)\)"), lambda m: f"see as ({m[1]})"),
)


def chain_words(chain: Sequence[str]) -> str:
    """An op chain in words, in the order in which the loader applied it.

    >>> chain_words(("narrow(0, 192, 192)", "unsqueeze(0)"))
    'take 192:384 of dim 0, then add a dim at 0'
    """
    if not chain:
        return "the whole tensor"
    return ", then ".join(_word(op) for op in chain)


def _word(op: str) -> str:
    for pattern, words in _WORDS:
        found = pattern.fullmatch(op)
        if found:
            return words(found)
    return op


def progression(texts: Sequence[str], letter: str) -> str | None:
    """One text for texts that count up evenly, None when they do not.

    >>> progression(["[0:192, :]", "[192:384, :]", "[384:576, :]"], "i")
    '[192i:192i+192, :]'
    """
    if len(set(texts)) == 1:
        return texts[0]
    pieces = [_NUMBER.split(t) for t in texts]
    first = pieces[0]
    if any(p[::2] != first[::2] for p in pieces):
        return None
    out: list[str] = []
    for at, piece in enumerate(first):
        if at % 2 == 0:
            out.append(piece)
            continue
        numbers = [int(p[at]) for p in pieces]
        step = numbers[1] - numbers[0]
        product = step and first[at + 1][:1] == "i"  # of two letters, which no reader would take for one
        if product or step < 0 or any(n != numbers[0] + i * step for i, n in enumerate(numbers)):
            return None
        counted = f"{step}{letter}" if step > 1 else letter
        out.append(piece if not step else counted if not numbers[0] else f"{counted}+{numbers[0]}")
    return "".join(out)


@frozen(slots=True)
class WriteLine:
    """Writes that say the same thing, folded into one line."""

    workers: tuple[int, ...]
    producers: tuple[int, ...]
    sources: tuple[str, ...]
    slice: str
    parameter: str
    destination: str
    nbytes: int
    """Of all of them together."""
    chain: str
    loader: str
    i: int = 1
    """How many values the letter i takes: workers of the line, those that do the same as one. 1 where it is unused."""
    j: int = 1
    """How many values the letter j takes: the sources of the line. 1 where it is unused."""

    def texts(self) -> tuple[str, str, str]:
        """What may differ between the members of a line."""
        return self.slice, self.destination, self.chain


def fold(writes: Sequence[Write]) -> list[WriteLine]:
    """First over workers (letter i), then over sources (letter j). No line has two writes of one worker and source."""
    lines = [_line(w) for w in writes]
    lines = _fold_by(lines, lambda w: (w.sources, w.parameter, w.loader), lambda w: w.workers, "i")
    return _fold_by(
        lines,
        lambda w: (w.workers, w.i, w.parameter, w.loader, template(w.sources[0])),
        lambda w: indices(w.sources[0]),
        "j",
    )


def _line(w: Write) -> WriteLine:
    words = chain_words(w.chain)
    sources = (w.source,)
    return WriteLine(
        (w.worker,), (w.producer,), sources, w.slice, w.parameter, w.destination, w.nbytes, words, w.loader
    )


def _fold_by(lines: list[WriteLine], key: Any, member: Any, letter: str) -> list[WriteLine]:
    """Lines that agree in `key`, one of a `member` in each: the second line of one goes with other second lines."""
    turns: Counter[Any] = Counter()
    groups: dict[Any, list[WriteLine]] = {}
    for line in lines:
        kind = (key(line), tuple(_NUMBER.sub("#", t) for t in line.texts()))
        turn = turns[kind, member(line)]
        turns[kind, member(line)] += 1
        groups.setdefault((kind, turn), []).append(line)
    return [merged for members in groups.values() for merged in _merge(sorted(members, key=member), letter)]


def _merge(members: list[WriteLine], letter: str) -> list[WriteLine]:
    """Runs of equal lines first, then the progression over what is left; as they are when there is none."""
    equal: dict[tuple[str, str, str], WriteLine] = {}
    for m in members:
        known = equal.get(m.texts())
        equal[m.texts()] = _together(known, m) if known else m
    lines = list(equal.values())
    if len(lines) == 1 or (len(lines) < 3 and letter == "j"):
        return lines
    texts = [progression(column, letter) for column in zip(*equal, strict=True)]
    if any(t is None for t in texts):
        return lines
    merged = lines[0]
    for line in lines[1:]:
        merged = _together(merged, line)
    return [evolve(merged, slice=texts[0], destination=texts[1], chain=texts[2], **{letter: len(lines)})]


def _together(a: WriteLine, b: WriteLine) -> WriteLine:
    return evolve(
        a,
        workers=tuple(sorted({*a.workers, *b.workers})),
        producers=tuple(sorted({*a.producers, *b.producers})),
        sources=tuple(dict.fromkeys((*a.sources, *b.sources))),
        nbytes=a.nbytes + b.nbytes,
    )


def letters_text(lines: Iterable[WriteLine]) -> str:
    """What the letters in these lines count; empty where there are none."""
    lines = list(lines)
    words = []
    if any(w.i > 1 for w in lines):
        alike = ", those that do the same as one" if any(1 < w.i < len(w.workers) for w in lines) else ""
        words.append(f"i counts the workers of a line from 0{alike}")
    if any(w.j > 1 for w in lines):
        words.append("j its sources" if words else "j counts the sources of a line from 0")
    return "; ".join(words) if words and "as one" in words[0] else ", ".join(words)
