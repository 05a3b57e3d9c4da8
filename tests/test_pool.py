"""The receive pool: when a slot may be overwritten, seen from several threads."""

from __future__ import annotations

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from rdtexec.pool import PoolGeometry, ReceivePool, Slot  # noqa: E402
from rdtplan.errors import TransferError  # noqa: E402

CPU = torch.device("cpu")


class Event:
    """A CUDA event as the pool sees it."""

    def __init__(self) -> None:
        self.completed = False

    def query(self) -> bool:
        return self.completed


def make_slot() -> Slot:
    return ReceivePool(PoolGeometry(1, 1, 64, "gpu"), CPU).slots[0][0]


def test_slots_divide_one_allocation() -> None:
    pool = ReceivePool(PoolGeometry(3, 2, 64, "gpu"), CPU)
    assert pool.memory.numel() == 3 * 2 * 64 and pool.memory.dtype == torch.uint8
    starts = [slot.buffer.data_ptr() - pool.memory.data_ptr() for lane in pool.slots for slot in lane]
    assert starts == [0, 64, 128, 192, 256, 320]
    assert all(slot.buffer.numel() == 64 for lane in pool.slots for slot in lane)
    assert [len(lane) for lane in pool.slots] == [2, 2, 2]


def test_memory_that_is_not_there_is_named_to_the_byte() -> None:
    with pytest.raises(TransferError) as caught:
        ReceivePool(PoolGeometry(2, 3, 1 << 58, "gpu"), CPU)
    assert caught.value.code == "RDT610"
    for word in (f"{6 << 58:,} bytes on cpu", "2 lanes of 3 slots", f"{1 << 58:,} bytes"):
        assert word in caught.value.message
    assert caught.value.fix


def test_a_slot_is_busy_from_queue_to_publish() -> None:
    slot = make_slot()
    assert slot.free()
    slot.queue()
    assert not slot.free()
    slot.publish(None)
    assert slot.free()


def test_a_slot_waits_for_its_read_done_event() -> None:
    slot, event = make_slot(), Event()
    slot.queue()
    slot.publish(event)
    assert not slot.free()
    event.completed = True
    assert slot.free()


def test_a_second_use_counts_anew() -> None:
    """An event of the last use that has completed says nothing of this one."""
    slot, first, second = make_slot(), Event(), Event()
    slot.queue()
    slot.publish(first)
    first.completed = True
    slot.queue()
    assert not slot.free()
    slot.publish(second)
    assert not slot.free()
    second.completed = True
    assert slot.free()


def test_all_queued_scatters_must_be_done() -> None:
    slot = make_slot()
    slot.queue()
    slot.queue()
    slot.publish(None)
    assert not slot.free()
    slot.publish(None)
    assert slot.free()


def test_publish_wakes_who_waits() -> None:
    pool = ReceivePool(PoolGeometry(2, 1, 64, "gpu"), CPU)
    slot = pool.slots[1][0]
    slot.queue()
    woken = threading.Event()

    def wait() -> None:
        with pool.changed:
            if pool.changed.wait_for(slot.free, timeout=60):
                woken.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.01)
    assert not woken.is_set()
    slot.publish(None)
    assert woken.wait(10)


def test_no_read_ever_sees_a_later_pull() -> None:
    """A scheduler and a scatter thread over two slots: what is read is what was pulled into the slot for it."""
    pool = ReceivePool(PoolGeometry(1, 2, 1024, "gpu"), CPU)
    jobs: list[tuple[int, Slot]] = []
    ready = threading.Condition()
    wrong: list[int] = []
    uses = 300

    def scatter() -> None:
        for expected in range(uses):
            with ready:
                ready.wait_for(lambda: jobs)
                number, slot = jobs.pop(0)
            try:
                view = slot.buffer.view(torch.int32)
                first = int(view[0])
                if expected % 7 == 0:
                    time.sleep(0.0005)
                if number != expected or first != number or int(view[-1]) != number or view.unique().numel() != 1:
                    wrong.append(number)
            finally:
                slot.publish(None)

    thread = threading.Thread(target=scatter)
    thread.start()
    for number in range(uses):
        slot = pool.slots[0][number % 2]
        with pool.changed:
            began = time.monotonic()
            assert pool.changed.wait_for(slot.free, timeout=10) and time.monotonic() - began < 5
        slot.buffer.view(torch.int32).fill_(number)
        slot.queue()
        with ready:
            jobs.append((number, slot))
            ready.notify()
    thread.join(10)
    assert not thread.is_alive() and not wrong
    assert all(slot.free() for slot in pool.slots[0])
