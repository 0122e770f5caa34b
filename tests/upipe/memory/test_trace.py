import gc
import time
import weakref
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from upipe.memory import Timeline, trace
from upipe.memory.ledger import Ledger


def floats(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.float32)


def live(timeline: Timeline) -> list[int]:
    return [event.live_bytes for event in timeline.events]


class TestBytes:
    def test_a_chain_that_frees(self):
        x = floats(100)

        def chain():
            a = x + 1
            b = torch.cat([a, a])
            del a
            return b * 3

        timeline = trace(chain)
        assert live(timeline) == [400, 800, 1600, 2000, 400]
        assert timeline.stream() == (
            ("start", (), ()),
            ("aten.add.Tensor", (400,), ()),
            ("aten.cat.default", (800,), (400,)),
            ("aten.mul.Tensor", (800,), (800, 800)),
            ("end", (), ()),
        )
        assert timeline.peak_bytes == 2000
        assert timeline.peak_event.op == "aten.mul.Tensor"

    def test_the_order_of_frees_decides(self):
        x = floats(100)

        def late():
            a = x + 1
            b = torch.cat([a, a])
            return a, b * 3

        assert trace(late).peak_bytes == 400 + 400 + 800 + 800

    def test_what_is_returned_is_dropped_inside_and_what_is_kept_is_not(self):
        x, kept = floats(100), []
        assert trace(lambda: x + 1).events[-2].freed_bytes == (400,)
        timeline = trace(lambda: kept.append(x + 1))
        assert timeline.events[-2].freed_bytes == ()
        assert live(timeline)[-1] == 800

    def test_in_place_and_views_are_no_new_storage(self):
        def views():
            x = floats(100)
            x.add_(1)
            part = x[90:]
            del x
            floats(50)
            part.mul_(2)
            del part
            floats(10)

        timeline = trace(views)
        assert live(timeline) == [0, 400, 400, 400, 600, 400, 40, 0]

    def test_a_new_tensor_over_the_memory_of_a_freed_one_is_counted_again(self):
        def loop():
            for _ in range(5):
                floats(100)

        timeline = trace(loop)
        assert timeline.op_counts == {"aten.zeros.default": 5}
        assert live(timeline) == [0, 400, 400, 400, 400, 400, 0]

    def test_what_autograd_saves_stays_until_backward_frees_it_in_cpp(self):
        x = floats(100).requires_grad_()

        def step():
            y = x.exp().exp()  # both exps save their output
            z = y.sum()
            del y
            z.backward()

        timeline = trace(step)
        ops = [event.op for event in timeline.events]
        assert live(timeline)[ops.index("aten.sum.default")] == 3 * 400 + 4
        # The product with the outer exp frees its output; the 4 bytes of z and of its gradient stay to the end.
        first, second = (i for i, op in enumerate(ops) if op == "aten.mul.Tensor")
        assert timeline.events[first].freed_bytes == (400,)
        assert live(timeline)[first] == 3 * 400 + 4 + 4 + 400
        assert live(timeline)[second] == 4 * 400 + 4 + 4

    def test_numbers_made_inside_were_not_there_before(self):
        timeline = trace(lambda: torch.tensor([1.0, 2.0]) + 1)
        assert timeline.baseline == ()
        assert live(timeline) == [0, 8, 16, 0]

    def test_meta_tensors_hold_nothing(self):
        assert trace(lambda: torch.empty(100, device="meta") + 1).peak_bytes == 0

    def test_sparse_tensors_are_refused(self):
        with pytest.raises(ValueError, match=r"strided tensors, not layout torch.sparse_coo"):
            trace(lambda: torch.eye(3).to_sparse())

    def test_the_tally_of_torchs_own_profiler(self):
        weights = [nn.Parameter(torch.randn(16, 16)) for _ in range(4)]
        x = torch.randn(64, 16)

        def step():
            h = x
            for weight in weights:
                h = torch.sin(h @ weight)
            h.sum().backward()

        def allocator_peak() -> int:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                step()
            events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
            total = peak = 0
            for event in sorted(events, key=lambda e: e.start_ns()):
                total += event.nbytes()
                peak = max(peak, total)
            return peak

        expected = allocator_peak()
        for weight in weights:
            weight.grad = None
        timeline = trace(step)
        assert timeline.peak_bytes == expected + x.nbytes + sum(weight.nbytes for weight in weights)


class TestResize:
    @staticmethod
    def resizing(x: Tensor, other: Tensor):
        def run():
            x.add_(1)
            x.untyped_storage().resize_(0)
            other + 1
            x.untyped_storage().resize_(1200)
            other + 1
            x.untyped_storage().resize_(0)

        return run

    def test_is_seen_at_the_next_allocation(self):
        timeline = trace(self.resizing(floats(100), floats(10)))
        assert timeline.stream() == (
            ("start", (), ()),
            ("aten.add_.Tensor", (), (400,)),
            ("aten.add.Tensor", (40,), (40,)),
            ("aten.add.Tensor", (40, 1200), (40, 1200)),
            ("end", (), ()),
        )
        assert live(timeline) == [440, 440, 80, 1280, 40]

    def test_a_trace_blind_to_it_is_wrong(self, monkeypatch):
        monkeypatch.setattr(Ledger, "notice_resizes", lambda *args: None)
        assert trace(self.resizing(floats(100), floats(10))).peak_bytes == 480

    def test_shrinking_one_and_growing_another_never_counts_both(self):
        a, b = floats(100), floats(100)

        def swap():
            a.add_(1)
            a.untyped_storage().resize_(0)
            b.untyped_storage().resize_(400)
            b.add_(1)

        b.untyped_storage().resize_(0)
        timeline = trace(swap, owners={"weights": [a, b]})
        assert live(timeline) == [400, 400, 400, 400]
        assert timeline.at_peak == {"weights": 400}

    def test_an_op_that_grows_its_argument(self):
        timeline = trace(lambda: floats(10).resize_(100).resize_(20))  # resize_ keeps a storage that is large enough
        assert live(timeline) == [0, 40, 400, 400, 0]


class TestSideEffects:
    def test_none_are_left_after_an_exception(self):
        kept = []

        def fail():
            kept.append(floats(100))
            raise KeyError("mine")

        assert gc.isenabled()
        with pytest.raises(KeyError, match="mine"):
            trace(fail)
        assert gc.isenabled()
        alive = weakref.ref(kept[0].untyped_storage())
        kept.clear()
        assert alive() is None

    def test_a_reference_cycle_counts_as_alive_in_every_run(self):
        def cycle():
            for _ in range(50):
                loop = [floats(100)]
                loop.append(loop)
                [[] for _ in range(1000)]  # enough objects for the collector to wake up

        with ExitStack() as stack:
            stack.callback(gc.set_threshold, *gc.get_threshold())
            gc.set_threshold(100)
            assert trace(cycle).peak_bytes == 50 * 400


class TestCost:
    @staticmethod
    def per_op_ms(run, repeats: int = 5, ops: int = 200) -> float:
        def timed() -> float:
            start = time.thread_time()
            for _ in range(ops):
                run()
            return (time.thread_time() - start) / ops * 1e3

        return min(timed() for _ in range(repeats))

    @pytest.mark.parametrize("run", [lambda x: x + 1, lambda x: x.view(2, 5)], ids=["allocates", "views"])
    def test_with_500_live_storages(self, run):
        x, others, traced = floats(10), [floats(10) for _ in range(500)], []
        trace(lambda: traced.append(self.per_op_ms(lambda: run(x))), owners={"other": others})
        # Several times what it takes on an idle core: a bound that a shared machine keeps.
        assert traced[0] - self.per_op_ms(lambda: run(x)) < 0.3
