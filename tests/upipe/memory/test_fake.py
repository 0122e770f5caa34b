import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from upipe import AttentionMask
from upipe.memory import Timeline, fake_ranks, trace
from upipe.memory.ledger import Ledger
from upipe.testing import lone_rank

LAYERS, WIDTH, RANKS = 3, 256, 8
WEIGHT_BYTES = WIDTH * WIDTH * 2  # bf16, as gathered
SHARD_BYTES = WIDTH * WIDTH * 4 // RANKS  # fp32, as kept


class TestGroup:
    def test_is_the_default_one_of_that_size(self):
        with fake_ranks(6, rank=4) as group:
            assert group is dist.group.WORLD
            assert (dist.get_world_size(), dist.get_rank(), dist.get_backend()) == (6, 4, "fake")

    def test_is_gone_after_an_exception(self):
        with pytest.raises(KeyError, match="mine"), fake_ranks(2):
            raise KeyError("mine")
        assert not dist.is_initialized()
        assert not isinstance(torch.empty(1), FakeTensor)

    def test_takes_the_place_of_no_other(self):
        with lone_rank() as group:
            with pytest.raises(
                ValueError, match=r"a process group of 1 ranks \(gloo\) is there already.*destroy_process_group"
            ):
                fake_ranks(2).__enter__()
            assert dist.group.WORLD is group

    @pytest.mark.parametrize(("world_size", "rank"), [(2, 2), (2, -1), (0, 0)])
    def test_has_the_rank(self, world_size, rank):
        with pytest.raises(ValueError, match=rf"rank={rank} must be from 0 to world_size-1; world_size={world_size}"):
            fake_ranks(world_size, rank).__enter__()
        assert not dist.is_initialized()

    def test_exchanges(self):
        with fake_ranks(4) as group:
            send, received = torch.empty(12, 5), torch.empty(12, 5)
            timeline = trace(lambda: dist.all_to_all_single(received, send, group=group))
            assert timeline.op_counts == {"c10d.alltoall_base_.default": 1}
            assert timeline.peak_bytes == send.nbytes + received.nbytes

    def test_meshes_are_built_and_cut_inside(self):
        with fake_ranks(8, rank=6):
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "context"))
            assert mesh["context"].get_group().size() == 4
            assert tuple(mesh.get_coordinate()) == (1, 2)
            assert mesh._flatten("ranks").size() == 8
            assert DeviceMesh("cpu", [4, 5, 6, 7]).get_local_rank() == 2


class TestTensors:
    def test_take_no_memory(self):
        with fake_ranks(2):
            x = torch.empty(10**12, 4096, dtype=torch.bfloat16)
            assert trace(lambda: x + 1).peak_bytes == 2 * x.nbytes

    def test_have_no_values(self):
        with fake_ranks(2), pytest.raises(DataDependentOutputException):
            torch.randn(3).sum().item()

    def test_document_borders_are_real_and_checked(self):
        outside = torch.tensor([0, 4, 9], dtype=torch.int32)
        with fake_ranks(2):
            inside = torch.tensor([0, 4, 9], dtype=torch.int32)
            for borders in (inside, outside):
                assert borders.diff().tolist() == [4, 5]
                AttentionMask(cu_seqlens=borders).check(batch=1, tokens=9, num_heads=2)
            with pytest.raises(ValueError, match="never fall"):
                AttentionMask(cu_seqlens=torch.tensor([0, 9, 4], dtype=torch.int32))

    def test_a_real_one_with_a_fake_one_gives_a_fake_one(self):
        borders = torch.tensor([0, 4, 9], dtype=torch.int32)
        with fake_ranks(2):
            position = torch.arange(9, dtype=torch.int32)
            assert isinstance(position, FakeTensor)
            assert isinstance(torch.bucketize(position, borders, right=True), FakeTensor)

    def test_a_module_leaves_meta_as_a_fake_one(self):
        with fake_ranks(2):
            layer = nn.Linear(10**6, 10**6, device="meta").to(torch.bfloat16)
            assert layer.weight.is_meta
            assert not isinstance(layer.weight, FakeTensor)
            layer.to_empty(device="cpu")
            assert isinstance(layer.weight, FakeTensor)
            assert trace(lambda: layer(torch.empty(3, 10**6, dtype=torch.bfloat16))).at_peak == {
                "parameter": 2 * (10**12 + 10**6), "other": 2 * 6 * 10**6
            }  # fmt: skip


class TestFullyShard:
    """One rank of 8, bf16 weights gathered layer by layer, gradients reduced in fp32."""

    @staticmethod
    def steps(count: int) -> list[Timeline]:
        with fake_ranks(RANKS):
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "context"))._flatten("ranks")
            with torch.device("meta"):
                model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(torch.float32)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for layer in (*model, model):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            model.to_empty(device="cpu")
            x = torch.empty(3, WIDTH, dtype=torch.bfloat16)

            def step() -> None:
                model.zero_grad()
                model(x).sum().backward()

            return [trace(step, owners={"parameter": model.parameters()}) for _ in range(count)]

    @staticmethod
    def unsharded(timeline: Timeline) -> list[int]:
        """Bytes of unsharded weights at every event that changes them."""
        live, history = 0, []
        for event in timeline.events:
            for sign, blocks in ((1, event.new), (-1, event.freed)):
                change = sign * sum(block.num_bytes for block in blocks if block.owner == "fsdp.all_gather_copy_out")
                live += change
                if change:
                    history.append(live)
        return history

    def test_unsharded_weights_come_and_go_in_every_step(self):
        first, second = self.steps(2)
        one, two = WEIGHT_BYTES, 2 * WEIGHT_BYTES
        # Forward frees the weights of a layer before the next is used. Backward gathers one layer ahead.
        forward = [one, 0, one, 0, one, 0]
        assert self.unsharded(first)[:6] == forward
        assert self.unsharded(second)[:6] == forward
        for timeline in (first, second):
            assert max(self.unsharded(timeline)) <= two
            assert self.unsharded(timeline)[-1] == 0

    def test_a_trace_blind_to_resizes_keeps_all_weights(self, monkeypatch):
        monkeypatch.setattr(Ledger, "notice_resizes", lambda *args: None)
        assert max(self.unsharded(self.steps(1)[0])) == LAYERS * WEIGHT_BYTES

    def test_shards_and_their_gradients_are_owned(self):
        first, second = self.steps(2)
        for timeline in (first, second):
            before = {"parameter": 0, "gradient": 0, "input": 0}
            for block in timeline.baseline:
                before[block.owner] += block.num_bytes
            assert before["parameter"] == LAYERS * SHARD_BYTES
            grown = [block for event in timeline.events for block in event.new if block.owner == "gradient"]
            assert [block.num_bytes for block in grown if block.num_bytes == SHARD_BYTES] == [SHARD_BYTES] * LAYERS

    def test_the_second_step_starts_with_what_the_first_left(self):
        first, second = self.steps(2)
        assert sum(block.num_bytes for block in second.baseline if block.owner == "input") == 3 * WIDTH * 2
        assert abs(second.peak_bytes - first.peak_bytes) <= LAYERS * SHARD_BYTES
