import pytest
import torch

from upipe.memory import label, table, trace


class TestTable:
    def test_reads(self):
        def run():
            with label("attn.q"):
                q = torch.empty(2**20, dtype=torch.uint8)
            with label("attn.out"):
                return torch.cat([q, q])

        assert table(trace(run), unit_bytes=2**20) == (
            "peak at aten.cat.default in attn.out\n"
            "owner            bytes    GiB      A\n"
            "------------------------------------\n"
            "attn.out     2,097,152  0.002  2.000\n"
            "attn.q       1,048,576  0.001  1.000\n"
            "------------------------------------\n"
            "device peak  3,145,728  0.003  3.000\n"
            "host peak            0  0.000  0.000"
        )

    def test_without_a_unit(self):
        assert table(trace(lambda: torch.zeros(100))).splitlines()[1] == "owner        bytes    GiB"

    def test_refuses_a_unit_below_one_byte(self):
        with pytest.raises(ValueError, match=r"unit_bytes=0 must be at least 1 byte"):
            table(trace(lambda: None), unit_bytes=0)

    def test_repr_is_short(self):
        assert repr(trace(lambda: torch.zeros(1000))) == "Timeline(4,000 bytes at the peak, 0 on the host, 1 ops)"
