"""The schedule against its specification, which is restated here in integers and not read from the code."""

import ast
import re
from collections import Counter
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import upipe
from upipe import HeadSchedule, Stage
from upipe.schedule import KernelCall, balanced_split, valid_heads_per_stage


def up(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def allowed_heads_per_stage(num_heads: int, ranks: int) -> list[int]:
    """C, 2C, ... below H, and H itself; H < C: only H."""
    return [u for u in range(1, num_heads + 1) if u == num_heads or u % ranks == 0]


@st.composite
def geometries(draw):
    num_kv_heads, group, ranks = draw(st.integers(1, 16)), draw(st.integers(1, 8)), draw(st.integers(1, 16))
    num_heads = num_kv_heads * group
    return num_heads, num_kv_heads, ranks, draw(st.sampled_from(allowed_heads_per_stage(num_heads, ranks)))


any_geometry = given(geometries())
many = settings(max_examples=80, deadline=None)


def queries_of(schedule: HeadSchedule, rank: int) -> list[int]:
    return list(chain(*(stage.q_heads[rank] for stage in schedule.stages)))


def kv_sends(schedule: HeadSchedule) -> list[tuple[int, int, int]]:
    """(stage, rank, KV head) of every arrival."""
    return [
        (index, rank, head)
        for index, stage in enumerate(schedule.stages)
        for rank in range(schedule.ranks)
        for head in stage.new_kv_heads[rank]
    ]


@many
@given(st.integers(1, 128), st.integers(1, 16))
def test_valid_heads_per_stage(num_heads, ranks):
    assert list(valid_heads_per_stage(num_heads, ranks)) == allowed_heads_per_stage(num_heads, ranks)


@many
@given(st.integers(0, 100), st.integers(1, 20))
def test_balanced_split_is_contiguous_and_longest_first(length, parts):
    runs = balanced_split(length, parts)
    assert list(chain(*runs)) == list(range(length))
    assert [len(run) for run in runs] == [up(length - part, parts) for part in range(parts)]


def check_ranges(schedule: HeadSchedule) -> None:
    owned = [queries_of(schedule, rank) for rank in range(schedule.ranks)]
    assert list(chain(*owned)) == list(range(schedule.num_heads)), "a head is missing, twice or out of order"
    balanced = [up(schedule.num_heads - rank, schedule.ranks) for rank in range(schedule.ranks)]
    assert [len(heads) for heads in owned] == balanced, "ranges are not balanced, longer ones first"


def check_stages(schedule: HeadSchedule) -> None:
    per_stage = up(schedule.heads_per_stage, schedule.ranks)
    num_stages = up(up(schedule.num_heads, schedule.ranks), per_stage)
    assert len(schedule.stages) == num_stages
    for rank in range(schedule.ranks):
        sizes = [len(stage.q_heads[rank]) for stage in schedule.stages]
        assert max(sizes) <= per_stage, "a stage is larger than ceil(U/C)"
        assert max(sizes) - min(sizes) <= 1, "one stage takes the remainder"
        assert sizes.count(0) == max(0, num_stages - sum(sizes)), "a rank sits out although it has heads left"


def check_kv(schedule: HeadSchedule) -> None:
    group, stages = schedule.num_heads // schedule.num_kv_heads, schedule.stages
    for rank in range(schedule.ranks):
        needed = [{q // group for q in stage.q_heads[rank]} for stage in stages]
        for index, stage in enumerate(stages):
            earlier, later = set().union(*needed[:index]), set().union(*needed[index + 1 :])
            assert list(stage.kv_heads[rank]) == sorted(needed[index]), "not the KV heads of the stage's queries"
            assert list(stage.new_kv_heads[rank]) == sorted(needed[index] - earlier), "not sent once, at first need"
            assert list(schedule.done_kv_heads(index)[rank]) == sorted(needed[index] - later), (
                "not kept to the last need"
            )


def check_calls(schedule: HeadSchedule) -> None:
    group = schedule.num_heads // schedule.num_kv_heads
    for index, stage in enumerate(schedule.stages):
        for rank in range(schedule.ranks):
            calls = schedule.kernel_calls(index, rank)
            queries = stage.q_heads[rank]
            covered = [head for call in calls for head in queries[call.q_heads]]
            assert covered == list(queries), "the calls do not partition the query heads in order"
            for call in calls:
                assert call.arrival <= index
                kv_heads = schedule.stages[call.arrival].new_kv_heads[rank][call.kv_heads]
                each, rest = divmod(len(queries[call.q_heads]), len(kv_heads))
                assert (rest, each > 0) == (0, True), "unequal query counts in a call"
                # What a kernel does: query i of a call reads KV head i // (H/K) of the call.
                pairs = [(q, kv_heads[i // each]) for i, q in enumerate(queries[call.q_heads])]
                assert pairs == [(q, q // group) for q, _ in pairs], "a query is paired with another KV head"


CHECKS = (check_ranges, check_stages, check_kv, check_calls)


@pytest.mark.parametrize("check", CHECKS)
@many
@any_geometry
def test_schedule_keeps_the_rules(check, geometry):
    check(HeadSchedule.build(*geometry))


def with_queries(schedule: HeadSchedule, by_stage: list[list[tuple[int, ...]]]) -> HeadSchedule:
    """The same heads in other stages or on other ranks; KV heads follow."""
    group = schedule.num_heads // schedule.num_kv_heads
    stages, here = [], [set() for _ in range(schedule.ranks)]
    for row in by_stage:
        kv_heads = tuple(tuple(sorted({q // group for q in heads})) for heads in row)
        new = tuple(tuple(h for h in heads if h not in here[r]) for r, heads in enumerate(kv_heads))
        for held, heads in zip(here, new, strict=True):
            held.update(heads)
        stages.append(Stage(tuple(row), kv_heads, new))
    return replace(schedule, stages=tuple(stages))


def last_stage_takes_the_remainder() -> HeadSchedule:
    return with_queries(HeadSchedule.build(5, 5, 1, 2), [[(0,)], [(1,)], [(2, 3, 4)]])


def idle_with_heads_left() -> HeadSchedule:
    schedule = HeadSchedule.build(9, 9, 2, 4)
    return with_queries(schedule, [[(0, 1), (5, 6)], [(2, 3), (7, 8)], [(4,), ()]])


def whole_groups_before_balance() -> HeadSchedule:
    return with_queries(HeadSchedule.build(9, 3, 2, 9), [[(0, 1, 2, 3, 4, 5), (6, 7, 8)]])


def head_twice() -> HeadSchedule:
    return with_queries(HeadSchedule.build(4, 4, 2, 2), [[(0,), (2,)], [(0,), (3,)]])


def strided_ranges() -> HeadSchedule:
    """Heads dealt out like cards: the released code's pairing for pretrained GQA models."""
    return with_queries(HeadSchedule.build(8, 4, 4, 4), [[(0,), (1,), (2,), (3,)], [(4,), (5,), (6,), (7,)]])


def sent_again() -> HeadSchedule:
    schedule = HeadSchedule.build(4, 2, 2, 2)
    return replace(schedule, stages=tuple(replace(stage, new_kv_heads=stage.kv_heads) for stage in schedule.stages))


def kv_swapped() -> HeadSchedule:
    stage = Stage(((0, 1), (2, 3)), ((1,), (0,)), ((1,), (0,)))
    return replace(HeadSchedule.build(4, 2, 2, 4), stages=(stage,))


class UnequalCall(HeadSchedule):
    def kernel_calls(self, index, rank):
        stage = self.stages[index]
        return [KernelCall(slice(0, len(stage.q_heads[rank])), slice(0, len(stage.kv_heads[rank])), index)]


def unequal_counts_in_one_call() -> HeadSchedule:
    schedule = HeadSchedule.build(12, 4, 3, 12)
    return UnequalCall(**{field.name: getattr(schedule, field.name) for field in fields(schedule)})


@pytest.mark.parametrize(
    ("mutant", "check", "message"),
    [
        (last_stage_takes_the_remainder, check_stages, "larger than"),
        (idle_with_heads_left, check_stages, "takes the remainder"),
        (whole_groups_before_balance, check_ranges, "balanced"),
        (head_twice, check_ranges, "twice"),
        (strided_ranges, check_ranges, "out of order"),
        (sent_again, check_kv, "sent once"),
        (kv_swapped, check_kv, "not the KV heads"),
        (unequal_counts_in_one_call, check_calls, "paired with another KV head"),
    ],
)
def test_checks_catch_mutants(mutant, check, message):
    with pytest.raises(AssertionError, match=message):
        check(mutant())


@many
@any_geometry
def test_heads_moved_counts_every_exchange(geometry):
    num_heads, num_kv_heads, ranks, _ = geometry
    group, start, sends = num_heads // num_kv_heads, 0, 0
    for rank in range(ranks):
        stop = start + up(num_heads - rank, ranks)
        sends += len({q // group for q in range(start, stop)})
        start = stop
    schedule = HeadSchedule.build(*geometry)
    assert len(kv_sends(schedule)) == sends
    assert schedule.heads_moved == 2 * num_heads + 2 * sends


@many
@any_geometry
def test_traffic_does_not_depend_on_heads_per_stage(geometry):
    num_heads, num_kv_heads, ranks, _ = geometry
    assert HeadSchedule.build(*geometry).heads_moved == HeadSchedule.build(num_heads, num_kv_heads, ranks).heads_moved


@many
@any_geometry
def test_kernel_calls_are_as_few_as_they_can_be(geometry):
    schedule = HeadSchedule.build(*geometry)
    group = schedule.num_heads // schedule.num_kv_heads
    arrival = {(rank, head): index for index, rank, head in kv_sends(schedule)}
    for index, stage in enumerate(schedule.stages):
        for rank in range(schedule.ranks):
            counts = Counter(q // group for q in stage.q_heads[rank])
            kinds = [(arrival[rank, head], counts[head]) for head in stage.kv_heads[rank]]
            changes = sum(kinds[i] != kinds[i - 1] for i in range(1, len(kinds)))
            assert len(schedule.kernel_calls(index, rank)) == (changes + 1 if kinds else 0)


@many
@any_geometry
def test_all_heads_at_once_is_one_stage(geometry):
    num_heads, num_kv_heads, ranks, _ = geometry
    schedule = HeadSchedule.build(num_heads, num_kv_heads, ranks, num_heads)
    assert len(schedule.stages) == 1
    assert schedule.stages[0].kv_heads == schedule.stages[0].new_kv_heads == schedule.done_kv_heads(0)


@many
@given(st.integers(1, 16), st.integers(1, 16))
def test_as_many_kv_heads_as_ranks_is_the_papers_schedule(ranks, group):
    """Untied Ulysses, GQA schedule: rank r attends with head r*g + s in stage s; K and V travel once, in stage 0."""
    schedule = HeadSchedule.build(ranks * group, ranks, ranks, ranks)
    assert [stage.q_heads for stage in schedule.stages] == [
        tuple((rank * group + index,) for rank in range(ranks)) for index in range(group)
    ]
    assert kv_sends(schedule) == [(0, rank, rank) for rank in range(ranks)]


def test_default_is_the_papers_choice():
    assert HeadSchedule.build(12, 4, 4).heads_per_stage == 4
    assert HeadSchedule.build(12, 4, 4) == HeadSchedule.build(12, 4, 4, 4)
    assert HeadSchedule.build(3, 1, 5).heads_per_stage == 3


def idle(schedule: HeadSchedule) -> int:
    return sum(not heads for stage in schedule.stages for heads in stage.q_heads)


def test_smollm_heads_on_four_ranks():
    schedule = HeadSchedule.build(30, 10, 4, 8)
    assert len(schedule.stages) == 4
    assert {len(heads) for stage in schedule.stages[:3] for heads in stage.q_heads} == {2}
    assert [len(heads) for heads in schedule.stages[3].q_heads] == [2, 2, 1, 1]
    assert len(kv_sends(schedule)) == 13
    assert idle(schedule) == 0


def test_fewer_kv_heads_than_ranks_keeps_each_copy_for_both_stages():
    schedule = HeadSchedule.build(32, 8, 16, 16)
    assert kv_sends(schedule) == [(0, rank, rank // 2) for rank in range(16)]
    assert schedule.done_kv_heads(0) == ((),) * 16
    assert schedule.done_kv_heads(1) == tuple((rank // 2,) for rank in range(16))


def test_unavoidable_idle_ranks():
    assert idle(HeadSchedule.build(6, 1, 4, 4)) == 2
    assert idle(HeadSchedule.build(8, 8, 3, 3)) == 1


def test_unequal_query_counts_take_two_kernel_calls():
    """Rank 0 of three owns heads 0 to 4 of groups of three: three queries on KV head 0, two on KV head 1."""
    schedule = HeadSchedule.build(15, 5, 3, 15)
    calls = [(call.q_heads, call.kv_heads, call.arrival) for call in schedule.kernel_calls(0, 0)]
    assert calls == [(slice(0, 3), slice(0, 1), 0), (slice(3, 5), slice(1, 2), 0)]


def test_table_of_llama3_8b_on_eight_ranks():
    assert (
        str(HeadSchedule.build(32, 8, 8))
        == """\
32 query heads, 8 KV heads, 8 ranks, U = 8: 4 stages, 80 head-tensors exchanged in a forward
stage | rank 0     rank 1     rank 2     rank 3     rank 4     rank 5     rank 6     rank 7
    0 | q0  +kv0   q4  +kv1   q8  +kv2   q12  +kv3  q16  +kv4  q20  +kv5  q24  +kv6  q28  +kv7
    1 | q1   kv0   q5   kv1   q9   kv2   q13   kv3  q17   kv4  q21   kv5  q25   kv6  q29   kv7
    2 | q2   kv0   q6   kv1   q10   kv2  q14   kv3  q18   kv4  q22   kv5  q26   kv6  q30   kv7
    3 | q3   kv0   q7   kv1   q11   kv2  q15   kv3  q19   kv4  q23   kv5  q27   kv6  q31   kv7
+kv: K and V of this head arrive; kv: they are still here from an earlier stage"""
    )


def test_table_of_an_uneven_schedule():
    assert (
        str(HeadSchedule.build(14, 7, 3, 6))
        == """\
14 query heads, 7 KV heads, 3 ranks, U = 6: 3 stages, 44 head-tensors exchanged in a forward
stage | rank 0           rank 1           rank 2
    0 | q0-1  +kv0       q5-6  +kv2-3     q10-11  +kv5
    1 | q2-3  +kv1       q7-8   kv3 +kv4  q12  +kv6
    2 | q4  +kv2         q9   kv4         q13   kv6
+kv: K and V of this head arrive; kv: they are still here from an earlier stage"""
    )


def test_table_shows_idle_ranks():
    assert (
        str(HeadSchedule.build(10, 2, 4, 4))
        == """\
10 query heads, 2 KV heads, 4 ranks, U = 4: 3 stages, 30 head-tensors exchanged in a forward
stage | rank 0    rank 1    rank 2    rank 3
    0 | q0  +kv0  q3  +kv0  q6  +kv1  q8  +kv1
    1 | q1   kv0  q4   kv0  q7   kv1  q9   kv1
    2 | q2   kv0  q5  +kv1  -         -
+kv: K and V of this head arrive; kv: they are still here from an earlier stage"""
    )


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (
            (8, 4, 2, 3),
            "heads_per_stage=3 must be a multiple of 2 (context-parallel ranks) below 8, or 8 itself; "
            "valid for 8 heads: 2, 4, 6, 8",
        ),
        (
            (3, 1, 4, 4),
            "heads_per_stage=4 must be a multiple of 4 (context-parallel ranks) below 3, or 3 itself; "
            "valid for 3 heads: 3",
        ),
        (
            (7, 7, 3, 9),
            "heads_per_stage=9 must be a multiple of 3 (context-parallel ranks) below 7, or 7 itself; "
            "valid for 7 heads: 3, 6, 7",
        ),
        ((12, 5, 2, 2), "num_heads=12 must be a multiple of num_kv_heads=5; valid KV heads: 1, 2, 3, 4, 6, 12"),
        ((0, 1, 2, 2), "num_heads=0 must be at least 1"),
        ((4, 0, 2, 2), "num_kv_heads=0 must be at least 1"),
        ((4, 2, 0, 2), "ranks=0 must be at least 1"),
    ],
)
def test_errors_say_the_rule_the_values_and_a_way_out(geometry, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        HeadSchedule.build(*geometry)


@many
@given(st.integers(1, 40), st.integers(1, 16), st.integers(-3, 60))
def test_every_other_heads_per_stage_is_refused(num_heads, ranks, heads_per_stage):
    allowed = allowed_heads_per_stage(num_heads, ranks)
    if heads_per_stage in allowed:
        HeadSchedule.build(num_heads, 1, ranks, heads_per_stage)
        return
    with pytest.raises(ValueError, match=f"valid for {num_heads} heads: {', '.join(map(str, allowed))}$"):
        HeadSchedule.build(num_heads, 1, ranks, heads_per_stage)


@pytest.mark.parametrize("name", ["schedule.py", "layout.py"])
def test_plans_are_plain_integers(name):
    tree = ast.parse(Path(upipe.__file__).with_name(name).read_text())
    imported = {
        module.split(".")[0]
        for node in ast.walk(tree)
        for module in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "relative"]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported
    assert not imported & {"torch", "numpy", "einops", "upipe", "relative"}
