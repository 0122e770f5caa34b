import copy
import gc
import logging
import pickle
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from upipe import offload
from upipe.memory import fake_ranks, trace
from upipe.offload import HostMemory, Kept, available_bytes, to_device, to_host

GIB = 2**30


class Deferred:
    """A mover that copies as late as it may, when waited for: whoever does not wait reads NaN or loses the source."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pending: list[tuple[str, weakref.ref[Tensor] | Tensor, Tensor]] = []
        self.live: list[Tensor] = []
        self.most_pending = 0
        self.on_start: Callable[[], object] = lambda: None

    def start_to_host(self, tensor: Tensor) -> tuple[Tensor, str]:
        self.on_start()
        host = torch.full_like(tensor, torch.nan)
        self.live.append(host)
        return host, self._start(f"out {name(tensor)}", weakref.ref(tensor), host)

    def start_to_device(self, host: Tensor) -> tuple[Tensor, str]:
        tensor = torch.full_like(host, torch.nan)
        leaving = [source for _, source, destination in self.pending if destination is host]
        number = name(leaving[0]() if leaving else host)
        return tensor, self._start(f"in {number}", host, tensor)

    def _start(self, ticket: str, source: "weakref.ref[Tensor] | Tensor", destination: Tensor) -> str:
        self.pending.append((ticket, source, destination))
        self.log.append(ticket)
        self.most_pending = max(self.most_pending, len(self.pending))
        return ticket

    def wait(self, ticket: str) -> None:
        self.log.append(f"wait {ticket}")
        while any(pending == ticket for pending, _, _ in self.pending):  # earlier ones end first
            self._finish()

    def _finish(self) -> None:
        ticket, source, destination = self.pending.pop(0)
        tensor = source() if isinstance(source, weakref.ref) else source
        assert tensor is not None, f"{ticket}: the source was let go before the copy was over"
        destination.copy_(tensor)

    def abandon(self, tensor: Tensor) -> None:
        self.log.append("abandon")
        for i, (ticket, source, destination) in enumerate(self.pending):
            if isinstance(source, weakref.ref) and source() is tensor:
                self.pending[i] = ticket, tensor, destination

    def free(self, host: Tensor) -> None:
        (index,) = (i for i, known in enumerate(self.live) if known is host)  # fails on a second free
        del self.live[index]

    def spare_sizes(self) -> tuple[int, ...]:
        return ()

    def trim(self) -> None: ...

    def settle(self) -> None:
        while self.pending:
            self._finish()


def name(tensor: Tensor | None) -> int:
    assert tensor is not None
    return int(tensor.flatten()[0])


def numbered(i: int) -> Tensor:
    return torch.full((3, 5), float(i))


def step(memory: HostMemory, num_tensors: int) -> list[Kept]:
    return [memory.put(numbered(i)) for i in range(num_tensors)]


def back(memory: HostMemory, kept: list[Kept]) -> None:
    for i, k in reversed(list(enumerate(kept))):
        assert torch.equal(memory.get(k), numbered(i)), f"tensor {i} was read before its copy was over"


def check_copies(memory: HostMemory, mover: Deferred) -> None:
    """A step whose copies take as long as they may."""
    back(memory, step(memory, 6))
    assert mover.most_pending <= memory.in_flight, f"{mover.most_pending} copies in flight"
    assert not mover.pending
    assert not mover.live
    assert memory.host_bytes == 0


class TestOrder:
    def test_copies_and_waits(self):
        mover = Deferred()
        memory = HostMemory(mover=mover)
        kept = step(memory, 4)
        assert mover.log == ["out 0", "out 1", "wait out 0", "out 2"]
        mover.log.clear()
        memory.get(kept[3])  # never left; its get lets the sources go and fetches 2
        assert mover.log == ["wait out 1", "wait out 2", "in 2"]
        mover.log.clear()
        for k in reversed(kept[:3]):
            memory.get(k)
        assert mover.log == ["in 1", "wait in 2", "in 0", "wait in 1", "wait in 0"]

    def test_two_are_kept_and_nothing_is_fetched_ahead(self):
        mover = Deferred()
        memory = HostMemory(keep_last=2, in_flight=1, prefetch=0, mover=mover)
        kept = step(memory, 4)
        assert mover.log == ["out 0", "wait out 0", "out 1"]
        back(memory, kept)
        assert mover.log[3:] == ["wait out 1", "in 1", "wait in 1", "in 0", "wait in 0"]

    def test_none_is_kept(self):
        mover = Deferred()
        memory = HostMemory(keep_last=0, mover=mover)
        back(memory, step(memory, 2))
        assert mover.log == ["out 0", "out 1", "wait out 0", "wait out 1", "in 1", "in 0", "wait in 1", "wait in 0"]

    def test_blocks_of_three_are_fetched_together(self):
        mover = Deferred()
        memory = HostMemory(keep_last=3, in_flight=3, prefetch=3, mover=mover)
        kept = step(memory, 6)
        memory.get(kept[5])  # 3 and 4 are here, 2 is fetched
        assert [entry for entry in mover.log if entry.startswith("in")] == ["in 2"]
        back(memory, kept[:5])
        assert [entry for entry in mover.log if entry.startswith("in")] == ["in 2", "in 1", "in 0"]

    @pytest.mark.parametrize("options", [{}, {"keep_last": 0}, {"in_flight": 1}, {"prefetch": 0}, {"prefetch": 4}])
    def test_a_step_of_slow_copies(self, options):
        mover = Deferred()
        memory = HostMemory(mover=mover, **options)
        check_copies(memory, mover)
        check_copies(memory, mover)

    def test_a_source_is_let_go_once_its_copy_was_waited_for(self):
        memory = HostMemory(keep_last=0, in_flight=1, mover=Deferred())
        x = numbered(0)
        storage = weakref.ref(x.untyped_storage())
        first = memory.put(x)
        del x
        assert storage() is not None
        second = memory.put(numbered(1))
        assert storage() is None
        back(memory, [first, second])

    def test_two_are_fetched_ahead_the_later_one_first(self):
        mover = Deferred()
        memory = HostMemory(in_flight=3, prefetch=2, mover=mover)
        kept = step(memory, 5)
        memory.get(kept[4])
        assert mover.log[-2:] == ["in 3", "in 2"]
        memory.get(kept[3])
        assert mover.log[-2:] == ["in 1", "wait in 3"]

    def test_any_order_is_right(self):
        memory = HostMemory(mover=Deferred())
        kept = step(memory, 5)
        for i in (1, 4, 0, 2, 3):
            assert name(memory.get(kept[i])) == i

    @settings(deadline=None, max_examples=150)
    @given(
        calls=st.lists(st.tuples(st.sampled_from(["put", "put", "get", "drop", "delete", "reset"]), st.integers(0, 9))),
        options=st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 3)),
    )
    def test_whatever_is_called(self, calls, options):
        keep_last, in_flight, prefetch = options
        mover = Deferred()
        memory = HostMemory(keep_last=keep_last, in_flight=in_flight, prefetch=prefetch, mover=mover)
        kept: list[tuple[int, Kept]] = []
        for number, (call, index) in enumerate(calls):
            if call == "put":
                kept.append((number, memory.put(numbered(number))))
            elif call == "reset":
                memory.reset()
                kept.clear()
            elif kept:
                i, k = kept.pop(index % len(kept))
                if call == "get":
                    assert torch.equal(memory.get(k), numbered(i))
                elif call == "drop":
                    memory.drop(k)
                del k
            assert memory.host_bytes == 60 * len(mover.live) <= 60 * len(kept)
        kept.clear()
        mover.settle()
        assert not mover.live
        assert not memory._slots
        assert not memory._flying


def use_before_completion():
    retire = HostMemory._retire

    def hasty(self, slot):
        with mock.patch.object(slot.mover, "wait"):
            retire(self, slot)

    return mock.patch.object(HostMemory, "_retire", lambda m, s: (hasty if "in" in s.ticket else retire)(m, s))


def source_let_go_at_once():
    take_off = HostMemory._take_off

    def careless(self, slot, state):
        slot.tensor = slot.tensor.clone() if "out" in slot.ticket else slot.tensor
        take_off(self, slot, state)

    return mock.patch.object(HostMemory, "_take_off", careless)


def unbounded_in_flight():
    return mock.patch.object(HostMemory, "_bound")


def host_memory_kept():
    return mock.patch.object(Deferred, "free")


@pytest.mark.parametrize(
    ("mutant", "complaint"),
    [
        (use_before_completion, "tensor 4 was read before its copy was over"),
        (source_let_go_at_once, "the source was let go before the copy was over"),
        (unbounded_in_flight, "5 copies in flight"),
        (host_memory_kept, "assert not"),
    ],
)
def test_mutants_are_caught(mutant, complaint):
    mover = Deferred()
    memory = HostMemory(mover=mover)
    with mutant(), pytest.raises(AssertionError, match=complaint):
        check_copies(memory, mover)


class TestWrites:
    """The source overwritten before its copy is over: by reuse of its memory above, by the user here."""

    def check_refused(self, memory: HostMemory, write_after: int, get: int) -> None:
        x = numbered(0)
        kept = [memory.put(x)]
        kept += [memory.put(numbered(i)) for i in range(1, 1 + write_after)]
        x.add_(7)
        with pytest.raises(RuntimeError, match=r"a tensor \[3, 5\] was written to in place after HostMemory.put"):
            memory.get(kept[get])
        with pytest.raises(ValueError, match="was written to after put and given up"):
            memory.get(kept[0])

    @pytest.mark.parametrize(("write_after", "get"), [(0, 0), (1, 0), (1, 1)])
    def test_while_held_or_leaving(self, write_after, get):
        self.check_refused(HostMemory(mover=Deferred()), write_after, get)
        self.check_refused(HostMemory(), write_after, get)

    def test_the_next_put_sees_it_too(self):
        memory = HostMemory(mover=Deferred())
        x = numbered(0)
        memory_of_x = memory.put(x)
        x[0] = 1
        with pytest.raises(RuntimeError, match="written to in place"):
            memory.put(numbered(1))
        with pytest.raises(ValueError, match="given up"):
            memory.get(memory_of_x)
        back(memory, step(memory, 3))

    def test_after_the_copy_it_is_allowed(self):
        memory = HostMemory(keep_last=0, in_flight=1, mover=Deferred())
        x = numbered(0)
        kept = [memory.put(x), memory.put(numbered(1))]
        x.add_(7)
        back(memory, kept)

    def test_the_check_is_what_catches_it(self):
        with (
            mock.patch.object(HostMemory, "_check_unwritten"),
            pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"),
        ):
            self.check_refused(HostMemory(mover=Deferred()), 1, 1)


TENSORS = {
    "contiguous": lambda: torch.randn(3, 5, 2),
    "transposed": lambda: torch.randn(3, 5, 2).transpose(0, 2),
    "every second": lambda: torch.randn(3, 5, 2)[:, ::2],
    "expanded": lambda: torch.randn(3, 1, 2).expand(3, 5, 2),
    "bf16": lambda: torch.randn(3, 5).bfloat16(),
    "integers": lambda: torch.arange(15).view(3, 5),
    "bool": lambda: torch.randn(3, 5) > 0,
    "empty": lambda: torch.randn(3, 0, 2),
    "scalar": lambda: torch.tensor(3.0),
    "view": lambda: torch.randn(7, 5)[2:4],
}


def check_round_trip(memory: HostMemory, kind: str, device: str = "cpu") -> None:
    x = TENSORS[kind]().to(device)
    y = memory.get(memory.put(x))
    assert torch.equal(x, y)
    assert (y.dtype, y.device) == (x.dtype, x.device)
    assert y.stride() == torch.empty_like(x).stride()
    assert y.untyped_storage().nbytes() == x.numel() * x.element_size()
    assert not x.numel() or y.data_ptr() != x.data_ptr()


class TestTensors:
    @pytest.mark.parametrize("kind", TENSORS)
    def test_round_trip(self, kind):
        check_round_trip(HostMemory(keep_last=0), kind)

    def test_a_kept_tensor_comes_back_itself(self):
        x = torch.randn(3, 5)
        memory = HostMemory()
        assert memory.get(memory.put(x)).data_ptr() == x.data_ptr()

    @pytest.mark.parametrize("keep_last", [0, 1])
    def test_history_is_left_behind(self, keep_last):
        memory = HostMemory(keep_last=keep_last)
        w = torch.randn(3, requires_grad=True)
        kept = memory.put(w * 2)
        y = memory.get(kept)
        assert not y.requires_grad
        assert y.grad_fn is None
        assert torch.equal(y, (w * 2).detach())

    @pytest.mark.parametrize("keep_last", [0, 1])
    def test_inference_tensors(self, keep_last):
        memory = HostMemory(keep_last=keep_last)
        with torch.inference_mode():
            x = torch.randn(3)
            assert torch.equal(memory.get(memory.put(x)), x)

    def test_ops(self):
        for op, args in ((to_host, ()), (to_device, (torch.device("cpu"),))):
            for kind in ("contiguous", "transposed", "every second", "integers"):
                torch.library.opcheck(op, (TENSORS[kind](), *args), test_utils=("test_schema", "test_faketensor"))


class Offloaded(torch.autograd.Function):
    """y = sin(x), its input in the care of a HostMemory."""

    @staticmethod
    def forward(ctx, x, memory):
        ctx.memory, ctx.kept = memory, memory.put(x)
        return x.sin()

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.memory.get(ctx.kept).cos(), None


class TestAutograd:
    @pytest.mark.parametrize("mover", [None, Deferred()], ids=["ops", "slow copies"])
    def test_gradients(self, mover):
        memory = HostMemory(mover=mover)
        x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
        upstream = torch.randn(3, 5, dtype=torch.float64)
        y, z = x, x
        with mock.patch(f"{__name__}.name", return_value=0):
            for _ in range(4):
                y, z = Offloaded.apply(y, memory), z.sin()
            (ours,) = torch.autograd.grad(y, x, upstream)
        (truth,) = torch.autograd.grad(z, x, upstream)
        assert torch.equal(ours, truth)
        assert memory.host_bytes == 0

    def test_a_second_backward_is_refused(self):
        memory = HostMemory()
        x = torch.randn(3, requires_grad=True)
        y = Offloaded.apply(Offloaded.apply(x, memory), memory).sum()
        y.backward(retain_graph=True)
        with pytest.raises(ValueError, match="was taken by get; a tensor is put once and got once"):
            y.backward()

    def test_an_exception_in_a_step_frees_with_the_graph(self):
        memory = HostMemory()

        def fails():
            y = torch.randn(3, requires_grad=True)
            for _ in range(4):
                y = Offloaded.apply(y, memory)
            assert memory.host_bytes == 3 * 12
            raise ArithmeticError

        with pytest.raises(ArithmeticError):
            fails()
        gc.collect()
        assert memory.host_bytes == 0
        back(memory, step(memory, 4))


class TestHandles:
    def test_get_twice_or_after_drop_or_reset(self):
        memory = HostMemory()
        kept = step(memory, 4)
        memory.get(kept[3])
        memory.drop(kept[2])
        memory.drop(kept[2])  # once more does nothing
        memory.reset()
        for k, end in ((kept[3], "taken by get"), (kept[2], "dropped"), (kept[1], "given up by reset")):
            with pytest.raises(ValueError, match=rf"Kept\(\[3, 5\], torch.float32, gone\) was {end}"):
                memory.get(k)
        memory.drop(kept[3])

    def test_deleting_frees(self):
        memory = HostMemory(keep_last=0)
        kept = step(memory, 3)
        assert memory.host_bytes == 180
        del kept[1]
        assert memory.host_bytes == 120
        kept.clear()
        assert memory.host_bytes == 0

    def test_deleted_while_its_copy_runs(self):
        mover = Deferred()
        memory = HostMemory(keep_last=0, mover=mover)
        kept = step(memory, 2)
        del kept[0]
        assert mover.log == ["out 0", "out 1", "abandon"]
        assert len(mover.live) == 1
        assert name(memory.get(kept[0])) == 1

    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_deleted_in_the_middle_of_a_call(self, in_flight):
        """Where the garbage collector may do it."""
        mover = Deferred()
        memory = HostMemory(keep_last=0, in_flight=in_flight, mover=mover)
        kept = step(memory, 3)
        mover.on_start = lambda: kept.pop(0) if len(kept) > 1 else None
        last = memory.put(numbered(3))
        assert len(mover.live) == 3
        mover.on_start = lambda: None
        assert [name(memory.get(k)) for k in (last, *reversed(kept))] == [3, 2, 1]

    def test_two_users(self):
        one, other = HostMemory(limit_bytes=120), HostMemory(limit_bytes=180)
        kept = [(one.put(numbered(i)), other.put(numbered(10 + i))) for i in range(3)]
        with pytest.raises(ValueError, match=r"torch.float32, on the host|leaving .* belongs to another HostMemory"):
            one.get(kept[0][1])
        with pytest.raises(ValueError, match="belongs to another HostMemory; drop it"):
            one.drop(kept[0][1])
        one.reset()
        assert (one.host_bytes, other.host_bytes) == (0, 120)
        assert [name(other.get(theirs)) for _, theirs in reversed(kept)] == [12, 11, 10]

    def test_reset_in_the_middle_leaves_it_reusable(self):
        mover = Deferred()
        memory = HostMemory(mover=mover)
        kept = step(memory, 5)
        memory.get(kept[4])
        memory.reset()
        assert not mover.live
        mover.settle()
        mover.most_pending = 0
        check_copies(memory, mover)

    def test_copies_of_it_are_empty(self):
        memory = HostMemory(keep_last=2, limit_bytes=300)
        kept = step(memory, 3)
        for twin in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
            assert (twin.keep_last, twin.limit_bytes, twin.host_bytes) == (2, 300, 0)
        back(memory, kept)

    @pytest.mark.parametrize(
        ("option", "value"),
        [("keep_last", -1), ("in_flight", 0), ("prefetch", -1), ("processes", 0), ("limit_bytes", -1)],
    )
    def test_options_are_bounded(self, option, value):
        with pytest.raises(ValueError, match=rf"{option}={value} must be at least {value + 1}"):
            HostMemory(**{option: value})


def bytes_of_a_step(memory: HostMemory) -> None:
    kept = [memory.put(torch.zeros(100)) for _ in range(4)]
    while kept:
        memory.get(kept.pop())


# op, device bytes, host bytes
BY_HAND = [
    ("start", 0, 0),
    ("aten.zeros.default", 400, 0),
    ("aten.zeros.default", 800, 0),
    ("upipe.to_host.default", 800, 400),  # 0 leaves, 1 is held
    ("aten.zeros.default", 1200, 400),
    ("upipe.to_host.default", 1200, 800),  # 0 and 1 leave, 2 is held
    ("aten.zeros.default", 1600, 800),
    ("upipe.to_host.default", 1200, 1200),  # 1 and 2 leave, 3 is held
    ("upipe.to_device.default", 800, 1200),  # 3 is in use, 2 arrives
    ("upipe.to_device.default", 800, 1200),  # 2 is in use, 1 arrives
    ("upipe.to_device.default", 800, 800),  # 1 is in use, 0 arrives
    ("end", 0, 0),
]


class TestTrace:
    def test_device_and_host_bytes_by_hand(self):
        timeline = trace(lambda: bytes_of_a_step(HostMemory()))
        assert [(event.op, event.live_bytes, event.host_bytes) for event in timeline.events] == BY_HAND
        assert (timeline.peak_bytes, timeline.host_peak_bytes) == (1600, 1200)

    @pytest.mark.parametrize("options", [{}, {"keep_last": 0}, {"keep_last": 2, "in_flight": 1, "prefetch": 0}])
    def test_real_and_fake_agree(self, options):
        real = trace(lambda: bytes_of_a_step(HostMemory(**options)))
        with fake_ranks(2):
            fake = trace(lambda: bytes_of_a_step(HostMemory(**options)))
        assert real.stream() == fake.stream()
        assert [event.host_bytes for event in real.events] == [event.host_bytes for event in fake.events]

    @pytest.mark.parametrize(("keep_last", "in_flight"), [(0, 1), (1, 2), (2, 3)])
    def test_device_bytes_of_forward(self, keep_last, in_flight):
        memory, kept = HostMemory(keep_last=keep_last, in_flight=in_flight), []

        def forward():
            for _ in range(8):
                kept.append(memory.put(torch.zeros(100)))
            kept.clear()

        timeline = trace(forward)
        window = memory.plan(8, 400).forward_device_bytes
        assert window == 400 * (keep_last + in_flight)
        assert [e.live_bytes for e in timeline.events if e.op == "upipe.to_host.default"][-1] == window
        assert timeline.events[-1].live_bytes == timeline.events[-1].host_bytes == 0

    @pytest.mark.parametrize("prefetch", [0, 1, 2])
    def test_device_bytes_of_backward(self, prefetch):
        memory = HostMemory(prefetch=prefetch, in_flight=3)
        kept = [memory.put(torch.zeros(100)) for _ in range(8)]
        window = memory.plan(8, 400).backward_device_bytes
        assert window == 400 * (1 + prefetch)
        memory.get(kept.pop())  # lets go of the sources, which a trace does not know
        memory.drop(kept.pop())
        for k in kept[len(kept) - prefetch :]:
            memory.drop(k)
        del kept[len(kept) - prefetch :]

        def backward():
            while kept:
                memory.get(kept.pop())

        assert trace(backward).peak_without("input") == window

    def test_owner(self):
        timeline = trace(lambda: bytes_of_a_step(HostMemory()))
        owners = {(event.op, block.owner) for event in timeline.events for block in event.new}
        copies = {("upipe.to_host.default", "offload"), ("upipe.to_device.default", "offload")}
        assert owners == {("aten.zeros.default", "other"), *copies}

    def test_terabytes_of_fake_tensors(self):
        memory = HostMemory()
        with FakeTensorMode():
            kept = [memory.put(torch.empty(2**40, dtype=torch.bfloat16)) for _ in range(4)]
        assert memory.host_bytes == 3 * 2**41
        assert kept[0].num_bytes == 2**41


class TestPlan:
    def test_report(self):
        report = HostMemory(limit_bytes=480 * GIB).plan(32, 8 * GIB)
        assert report.host_bytes == 31 * 8 * GIB
        assert str(report) == ("host 248.0 GiB of 480.0 GiB free; device 24.0 GiB in forward, 16.0 GiB in backward")

    def test_short(self):
        with pytest.raises(MemoryError) as error:
            HostMemory(keep_last=0, limit_bytes=480 * GIB).plan(64, 8 * GIB)
        assert str(error.value) == (
            "host memory: 64 blocks of 8.0 GiB need 512.0 GiB, 480.0 GiB are free: 32.0 GiB short; "
            "use checkpoint_every=2, fewer tokens or more ranks"
        )
        with pytest.raises(MemoryError) as error:
            HostMemory(limit_bytes=90 * GIB).plan(64, 8 * GIB)
        assert str(error.value) == (
            "host memory: 64 blocks of 8.0 GiB need 504.0 GiB (keep_last=1 stay on the device), 90.0 GiB are free: "
            "414.0 GiB short; use checkpoint_every=6, fewer tokens or more ranks"
        )
        HostMemory(limit_bytes=90 * GIB).plan(11, 8 * GIB)  # 64 / 6 blocks, rounded up; with 64 / 5 are 13
        with pytest.raises(MemoryError, match="short; use fewer tokens or more ranks"):
            HostMemory(keep_last=0, limit_bytes=GIB).plan(64, 8 * GIB)

    def test_the_plan_is_what_a_step_takes(self):
        sizes = [400, 100, 40]
        memory = HostMemory(keep_last=2, limit_bytes=10**6)

        def forward():
            kept = [memory.put(torch.zeros(n // 4)) for _ in range(5) for n in sizes]
            kept.clear()

        assert trace(forward).host_peak_bytes == memory.plan(5, sizes).host_bytes == 5 * 540 - 140

    def test_what_the_system_has_is_shared(self):
        with mock.patch.object(offload, "available_bytes", return_value=800):
            assert HostMemory(processes=2).plan(5, 100).free_bytes == 400
            with pytest.raises(MemoryError, match=r"5 blocks of 101 bytes need 404 bytes .*: 4 bytes short"):
                HostMemory(processes=2).plan(5, 101)

    @pytest.mark.parametrize(("blocks", "sizes"), [(0, 8), (2, 0), (2, []), (2, [8, 0])])
    def test_nonsense(self, blocks, sizes):
        with pytest.raises(ValueError, match=rf"num_blocks={blocks} and each of block_bytes=.* must be at least 1"):
            HostMemory().plan(blocks, sizes)


class TestShortage:
    def test_in_put(self):
        memory = HostMemory(limit_bytes=20 * GIB)
        with FakeTensorMode():
            kept = [memory.put(torch.empty(8 * GIB, dtype=torch.uint8)) for _ in range(3)]
            with pytest.raises(MemoryError) as error:
                memory.put(torch.empty(8 * GIB, dtype=torch.uint8))
        assert str(error.value) == (
            "host memory: one more tensor of 8.0 GiB after 16.0 GiB, 4.0 GiB are free: 4.0 GiB short; "
            "use checkpoint_every, fewer tokens or more ranks"
        )
        assert memory.host_bytes == 16 * GIB
        del kept

    def test_it_leaves_the_others_as_they_were(self):
        memory = HostMemory(limit_bytes=120, mover=Deferred())
        kept = step(memory, 3)
        with pytest.raises(MemoryError, match="one more tensor of 60 bytes after 120 bytes, 0 bytes are free"):
            memory.put(numbered(3))
        back(memory, kept)
        back(memory, step(memory, 3))

    def test_an_allocation_that_fails(self):
        memory = HostMemory(keep_last=0, limit_bytes=2**60)
        huge = torch.zeros(1).expand(2**50)  # its copy would have 4 PiB
        with pytest.raises(MemoryError, match=r"one more tensor of 4194304.0 GiB .*: 4194304.0 GiB short"):
            memory.put(huge)
        back(memory, step(memory, 3))

    def test_what_the_system_has(self):
        memory = HostMemory(keep_last=0)
        with (
            mock.patch.object(offload, "available_bytes", return_value=59),
            pytest.raises(MemoryError, match="1 bytes short"),
        ):
            memory.put(numbered(0))
        with mock.patch.object(offload, "available_bytes", return_value=60):
            assert name(memory.get(memory.put(numbered(0)))) == 0

    def test_another_error_is_not_called_a_shortage(self):
        failure = RuntimeError("out of memory on another device")
        with mock.patch.object(offload, "to_host", side_effect=failure), pytest.raises(RuntimeError, match="another"):
            HostMemory(keep_last=0).put(numbered(0))
        mover = Deferred()
        memory = HostMemory(keep_last=0, mover=mover)
        mover.on_start = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            memory.put(numbered(0))
        mover.on_start = lambda: None
        check_copies(memory, mover)


class TestAvailable:
    def write(self, root, **groups):
        for path, text in {
            "proc/meminfo": "MemTotal:       1000 kB\nMemAvailable:    600 kB\n",
            "proc/self/cgroup": "1:cpu:/x\n0::/job/step\n",
            **groups,
        }.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)

    def group(self, path, limit, used, cache):
        folder = f"sys/fs/cgroup/{path}"
        return {
            f"{folder}/memory.max": f"{limit}\n",
            f"{folder}/memory.current": f"{used}\n",
            f"{folder}/memory.stat": f"anon 1\ninactive_file {cache}\n",
        }

    def test_the_whole_machine(self, tmp_path):
        self.write(tmp_path)
        assert available_bytes(tmp_path) == 600 * 1024

    def test_control_groups_and_their_parents(self, tmp_path):
        self.write(tmp_path, **self.group("job/step", "max", 900, 0), **self.group("job", 5000, 900, 100))
        assert available_bytes(tmp_path) == 4200
        self.write(tmp_path, **self.group("job/step", 1000, 2000, 500))
        assert available_bytes(tmp_path) == 0
        self.write(tmp_path, **self.group("job/step", 10**9, 0, 0), **self.group("job", "max", 0, 0))
        assert available_bytes(tmp_path) == 600 * 1024

    def test_without_proc(self, tmp_path):
        assert available_bytes(tmp_path) >= available_bytes() > 2**26


class Pin:
    """Page-locks nothing, refuses from the `limit`-th buffer on."""

    def __init__(self, limit: int = 10**9) -> None:
        self.limit = limit
        self.log: list[object] = []
        self.registered: dict[int, int] = {}

    def register(self, address: int, num_bytes: int) -> int:
        self.log.append("register")
        if len(self.registered) >= self.limit:
            return 2
        pages = range(address, address + num_bytes)
        assert not any(start in pages for start in self.registered), "a page was registered twice"
        self.registered[address] = num_bytes
        return 0

    def unregister(self, address: int) -> None:
        self.log.append("unregister")
        del self.registered[address]

    def settle(self) -> None:
        self.log.append("settle")


class TestPool:
    def test_equal_sizes_are_used_again(self):
        pin = Pin()
        pool = offload._Pool(pin, settle=pin.settle)
        first, second = pool.take(5000), pool.take(5000)
        assert first.data_ptr() != second.data_ptr()
        pool.give(5000, first)
        assert pool.spare_sizes() == [5000]
        assert pool.take(5001).data_ptr() not in (first.data_ptr(), second.data_ptr())
        assert pool.take(5000).data_ptr() == first.data_ptr()
        assert pin.log == ["register"] * 3

    @pytest.mark.parametrize("num_bytes", [0, 1, offload._PAGE, offload._PAGE + 1, 5 * 2**20 + 3])
    def test_whole_pages_and_no_more(self, num_bytes):
        pin = Pin()
        pool = offload._Pool(pin, settle=pin.settle)
        memory = pool.take(num_bytes)
        ((address, pinned_bytes),) = pin.registered.items()
        assert address == memory.data_ptr()
        assert address % offload._PAGE == pinned_bytes % offload._PAGE == 0
        assert max(num_bytes, 1) <= pinned_bytes < max(num_bytes, 1) + offload._PAGE
        assert memory.untyped_storage().nbytes() == pinned_bytes + offload._PAGE

    def test_buffers_go_back_to_the_system_after_their_copies(self):
        pin = Pin()
        pool = offload._Pool(pin, settle=pin.settle)
        pool.give(10, pool.take(10))
        used = pool.take(20)
        pin.log.clear()
        pool.trim()
        assert pin.log == ["settle", "unregister"]
        assert list(pin.registered) == [used.data_ptr()]
        assert pool.spare_sizes() == []
        del pool
        assert pin.log == ["settle", "unregister"] * 2
        assert not pin.registered

    def test_refused_once_unpinned_from_then_on(self, caplog):
        pin = Pin(limit=1)
        pool = offload._Pool(pin, settle=pin.settle)
        with caplog.at_level(logging.WARNING, "upipe"):
            buffers = [pool.take(10) for _ in range(4)]
        assert pin.log == ["register"] * 2
        (record,) = caplog.records
        assert record.message.startswith(
            "host memory: pinning 4,096 bytes failed (CUDA error 2), so copies from here on"
        )
        for memory in buffers:
            pool.give(10, memory)
        pool.trim()
        assert not pin.registered

    def test_unpinned_when_asked(self):
        pool = offload._Pool(None, settle=lambda: None)
        pool.give(10, pool.take(10))
        pool.trim()
        assert pool.spare_sizes() == []

    def test_no_memory(self):
        with pytest.raises(MemoryError, match="allocate"):
            offload._Pool(None, settle=lambda: None).take(2**50)


class CudaStandIn:
    """The parts of torch.cuda that copies need; notes who waits for whom and on which stream an op is issued."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = CudaStreamStandIn("main", self.log)
        self.pin = Pin()
        self.cudaHostRegister = lambda address, num_bytes, flags: self.pin.register(address, num_bytes)
        self.cudaHostUnregister = self.pin.unregister

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def installed(self):
        cuda = self

        class Ops(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.empty_strided):
                    cuda.log.append(f"{cuda.current.name}: {func.overloadpacket.__name__}")
                return func(*args, **(kwargs or {}))

        with (
            mock.patch.object(torch.cuda, "Stream", return_value=CudaStreamStandIn("side", self.log)),
            mock.patch.object(torch.cuda, "current_stream", side_effect=lambda device: self.current),
            mock.patch.object(torch.cuda, "stream", self.stream),
            mock.patch.object(torch.cuda, "cudart", return_value=self),
            mock.patch.object(
                Tensor, "record_stream", lambda _, stream: self.log.append(f"{stream.name}: record_stream")
            ),
            Ops(),
        ):
            yield


class CudaStreamStandIn:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.events = name, log, 0

    def wait_stream(self, other) -> None:
        self.log.append(f"{self.name}: wait {other.name}")

    def record_event(self) -> str:
        self.events += 1
        self.log.append(f"{self.name}: record {self.events}")
        return str(self.events)

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name}: wait {event}")

    def synchronize(self) -> None:
        self.log.append(f"{self.name}: synchronize")


COPY = ["side: wait main", "side: copy_"]


class TestCudaMover:
    @pytest.fixture
    def cuda(self):
        cuda = CudaStandIn()
        with cuda.installed():
            yield cuda

    def memory(self, pin=True, **options):
        return HostMemory(mover=offload._CudaMover(torch.device("cpu"), pin=pin), **options)

    def test_streams(self, cuda):
        memory = self.memory(keep_last=0)
        kept = [memory.put(torch.zeros(4)), memory.put(torch.ones(4))]
        assert cuda.log == [*COPY, "side: record 1", *COPY, "side: record 2"]
        cuda.log.clear()
        y = memory.get(kept[1])
        # The tensors to fill are allocated on the caller's stream, which waits for its own alone.
        assert cuda.log == ["main: wait 1", "main: wait 2"] + [
            entry for i in (3, 4) for entry in ("main: empty_strided", *COPY, f"side: record {i}")
        ] + ["main: wait 3"]
        assert torch.equal(y, torch.ones(4))
        assert torch.equal(memory.get(kept[0]), torch.zeros(4))

    def test_a_handle_deleted_in_flight(self, cuda):
        memory = self.memory(keep_last=0)
        memory.put(torch.zeros(4))
        assert cuda.log[-1] == "side: record_stream"

    @pytest.mark.parametrize("kind", TENSORS)
    @pytest.mark.parametrize("pin", [True, False])
    def test_round_trip(self, cuda, kind, pin):
        memory = self.memory(pin=pin, keep_last=0)
        check_round_trip(memory, kind)
        check_round_trip(memory, kind)
        assert len(cuda.pin.registered) == (1 if pin else 0)

    def test_buffers_are_used_again_and_given_back_with_the_object(self, cuda):
        memory = self.memory()
        for _ in range(3):
            back(memory, step(memory, 4))
        assert cuda.pin.log == ["register"] * 3
        cuda.log.clear()
        del memory
        assert cuda.pin.log == ["register"] * 3 + ["unregister"] * 3
        assert cuda.log == ["side: synchronize"]

    def test_buffers_of_old_sizes_make_room(self, cuda):
        memory = self.memory(keep_last=0, prefetch=0, limit_bytes=200)
        kept = [memory.put(torch.zeros(20)) for _ in range(2)]
        back_to_pool = kept.pop()
        memory.get(back_to_pool)
        assert len(cuda.pin.registered) == 2
        kept.append(memory.put(torch.zeros(30)))  # 80 in use + 80 unused + 120 is more than 200
        assert sorted(memory.mover._pool._all) == sorted(cuda.pin.registered)
        assert len(cuda.pin.registered) == 2
        assert memory.host_bytes == 200
        with pytest.raises(MemoryError, match="one more tensor of 4 bytes after 200 bytes"):
            memory.put(torch.zeros(1))

    def test_unused_buffers_are_memory_the_system_has_not(self, cuda):
        memory = self.memory(keep_last=0)
        memory.get(memory.put(torch.zeros(20)))
        with mock.patch.object(offload, "available_bytes", return_value=50):
            assert memory.plan(1, 80).free_bytes == 130
            memory.get(memory.put(torch.zeros(30)))  # 120 bytes: trimmed for it
            with pytest.raises(MemoryError, match=r"after 0 bytes, 170 bytes are free: 30 bytes short"):
                memory.put(torch.zeros(50))

    def test_an_equal_buffer_needs_no_room(self, cuda):
        memory = self.memory(keep_last=0, limit_bytes=80)
        for _ in range(2):
            memory.get(memory.put(torch.zeros(20)))
        assert cuda.pin.log == ["register"]

    def test_registration_refused(self, cuda, caplog):
        cuda.pin.limit = 1
        memory = self.memory()
        with caplog.at_level(logging.WARNING, "upipe"):
            for _ in range(2):
                back(memory, step(memory, 4))
        assert [record.levelname for record in caplog.records] == ["WARNING"]

    def test_the_error_of_a_refused_registration_is_taken_from_cuda(self, cuda):
        cuda.pin.limit, launches = 0, []

        def launch(*size, device):
            launches.append(device)
            raise RuntimeError("CUDA error: out of memory")

        with mock.patch.object(torch, "zeros", launch):
            assert offload._CudaPin(torch.device("cuda", 3)).register(0, 4096) == 2
        assert launches == [torch.device("cuda", 3)]


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
class TestCuda:
    @pytest.mark.parametrize("kind", TENSORS)
    @pytest.mark.parametrize("pin", [True, False])
    def test_round_trip(self, kind, pin):
        check_round_trip(HostMemory(pin=pin, keep_last=0), kind, "cuda")

    @pytest.mark.parametrize("pin", [True, False])
    def test_memory_that_is_reused_at_once(self, pin):
        """Every source and every result is overwritten as soon as it was let go, while copies are slow."""
        memory = HostMemory(pin=pin)
        for _ in range(2):
            kept = []
            for i in range(12):
                kept.append(memory.put(torch.full((2**22,), float(i), device="cuda")))
                torch.full((2**22,), -1.0, device="cuda")
            for i in reversed(range(12)):
                x = memory.get(kept[i])
                torch.full((2**22,), -1.0, device="cuda")
                assert bool((x == i).all())
                del x
        assert memory.host_bytes == 0

    def test_pinned_buffers_of_the_exact_size(self):
        memory = HostMemory(keep_last=0)
        kept = memory.put(torch.zeros(5 * 2**20 + 12, dtype=torch.uint8, device="cuda"))
        buffer = kept._slot.host
        assert buffer.view.is_pinned()
        assert buffer.memory.numel() == 5 * 2**20 + offload._PAGE
        assert not memory.get(kept).any()

    def test_device_bytes(self):
        memory = HostMemory()
        torch.cuda.synchronize()
        before, kept = torch.cuda.memory_allocated(), []
        for _ in range(8):
            kept.append(memory.put(torch.zeros(2**20, device="cuda")))
        assert torch.cuda.memory_allocated() - before == memory.plan(8, 2**22).forward_device_bytes
        x = memory.get(kept.pop())
        assert torch.cuda.memory_allocated() - before == memory.plan(8, 2**22).backward_device_bytes
        del x
        kept.clear()
        assert torch.cuda.memory_allocated() == before

    def test_a_refused_registration_leaves_no_error_behind(self, caplog):
        device = torch.device("cuda", torch.cuda.current_device())
        assert offload._CudaPin(device).register(0, 0) != 0
        assert float(torch.ones(2, device=device).sum()) == 2

    def test_backward_on_its_own_thread(self):
        memory = HostMemory()
        x = torch.randn(64, 64, device="cuda", requires_grad=True)
        upstream = torch.randn(64, 64, device="cuda")
        y, z = x, x
        for _ in range(6):
            y, z = Offloaded.apply(y, memory), z.sin()
        (ours,) = torch.autograd.grad(y, x, upstream)
        (truth,) = torch.autograd.grad(z, x, upstream)
        assert torch.equal(ours, truth)
        assert memory.host_bytes == 0
