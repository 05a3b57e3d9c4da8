"""Where the experts of a worker are: vLLM's physical-to-logical map, and the parameters that have a slot an expert.

With EPLB a layer of experts has *slots* (vLLM: physical experts), dealt over the workers in order; each holds one
logical expert, and some experts are held more than once. A parameter of such a layer has the slots of its worker along
its first dimension, so a region of it tells which slots it is of.
"""

from collections.abc import Iterator, Mapping

from attrs import frozen

from rdtplan.ir.manifest import Ints
from rdtplan.ir.regions import Region, span, split_pair

Placement = Mapping[str, Ints] | Ints
"""The logical expert of every slot: by leaf module, or one row for all layers."""


@frozen(slots=True)
class Experts:
    """The layers of experts of one worker under EPLB; empty without it."""

    modules: tuple[str, ...]
    """Leaf module of each layer."""
    logical: Ints
    """A layer: its number of logical experts."""
    slot_end: Ints
    """Slots of layer k are `slot_end[k-1] : slot_end[k]`, those of all workers together."""
    experts: Ints
    """A slot: the logical expert that it holds."""
    initial: Ints
    """A slot: the logical expert that vLLM's loaders put there; for people, and in no digest."""
    parameters: Ints
    """Indices of the parameters with slots along their first dimension."""
    layers: Ints
    """Each of them: index into `modules`."""
    first: Ints
    """Each of them: number of its first slot in the layer."""

    def placed(self, layer: int) -> Ints:
        """The logical expert of every slot of a layer."""
        return self.experts[self.slot_end[layer - 1] if layer else 0 : self.slot_end[layer]]

    def rows(self) -> dict[str, Ints]:
        """The same by leaf module."""
        return {module: self.placed(k) for k, module in enumerate(self.modules)}


NO_EXPERTS = Experts((), (), (), (), (), (), (), ())


def by_slot(source: Region, dest: Region, size: int) -> Iterator[tuple[int, Region, Region]]:
    """A copy into a parameter whose slots lie `size` elements apart, slot by slot: (slot, source, place in the slot).

    ValueError when it cannot be told apart.

    >>> [(slot, str(a), str(b)) for slot, a, b in by_slot(Region((8,), (1,), 8), Region((8,), (1,), 4), 4)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [(1, '[shape (4,) stride (1,) offset 8]', '[shape (4,) stride (1,) offset 0]'),
     (2, '[shape (4,) stride (1,) offset 12]', '[shape (4,) stride (1,) offset 0]')]
    """
    lo, hi = span(dest)
    slots = range(lo // size, (hi - 1) // size + 1)
    pieces = [(source, dest)]
    if len(slots) > 1:
        each = -(-dest.numel // len(slots))
        pieces = [(a, b) for b, a in split_pair(dest, source, each, (size,))]
    for a, b in pieces:
        lo, hi = span(b)
        slot = lo // size
        if (hi - 1) // size != slot:
            raise ValueError(f"{b} runs over slots of {size} elements")
        yield slot, a, Region(b.shape, b.stride, b.offset - slot * size)


def differences(ours: Ints, theirs: Ints) -> list[int]:
    """Slots that hold another expert."""
    return [slot for slot, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
