"""Laws of the bars and rates that `pengserve top` draws."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pengserve.cluster.cli import shape_views
from pengserve.cluster.cli.views import (
    bar,
    event_line,
    hit_rate,
    predicted_rate,
    rates_between,
    status_view,
    tenants_view,
    top_view,
)
from pengserve.cluster.memory_parts import host_parts, memory_parts
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.layout import Layout, parse_groups
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.snapshot import (
    ClusterSnapshot,
    InstanceStats,
    LaneInfo,
    LayoutPolicy,
    LayoutView,
    SwitchRecord,
)
from pengserve.planners.types.tenants import TenantUse
from tests.cluster.client.cluster_server import CAPACITY, instance, snapshot

SHARES = st.lists(st.floats(min_value=0, max_value=1.5), max_size=4)


@given(shares=SHARES, width=st.integers(min_value=1, max_value=60))
def test_a_bar_has_its_width_whatever_the_shares(shares, width):
    assert len(bar([(share, "x", "") for share in shares], width).plain) == width


@given(share=st.floats(min_value=1e-9, max_value=1.0))
def test_a_little_is_not_nothing(share):
    assert bar([(share, "x", "")]).plain.startswith("x")


def test_an_empty_bar_is_empty_and_a_full_one_full():
    assert bar([(0.0, "x", "")], 4).plain == "····"
    assert bar([(1.0, "x", "")], 4).plain == "xxxx"


def test_rates_need_two_moments_of_one_life():
    now = instance(0, total_generated_tokens=30, total_prompt_tokens=10)
    assert rates_between(None, now, 1.0) is None
    assert rates_between(now, now, 0.0) is None
    assert rates_between(instance(0, incarnation=1), now, 1.0) is None
    rates = rates_between(instance(0), now, 2.0)
    assert (rates.prompt_tokens_per_s, rates.generated_tokens_per_s) == (5.0, 15.0)


def test_no_lookups_is_no_hit_rate():
    assert hit_rate([instance(0)]) is None
    assert hit_rate([instance(0, total_prefix_queries=8, total_prefix_hits=2)]) == 0.25


def test_what_dispatch_predicted_stands_beside_what_was_found():
    assert predicted_rate([instance(0)]) is None
    assert predicted_rate([instance(i, total_prefix_queries=8, total_prefix_predicted=i) for i in range(2)]) == 1 / 16


def drawn(view, width: int = 160) -> list[str]:
    """The lines of a view, as a terminal of `width` columns shows them."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(view)
    return capture.get().splitlines()


DONE = SwitchRecord(
    plan_id="m",
    what="merge tp2@(2,0) (carry)",
    phase="done",
    why="load 0.1 is below 0.25",
    started_s=940.0,
    report=SwitchReport(
        plan_id="m", epoch=Epoch(4), meet_s=0.0031, cutover_s=0.0082, num_carried=4, carried_bytes=3 << 19
    ),
)


def merged() -> ClusterSnapshot:
    """Instance 2 leads 0 in a tp2 group, 1 is alone; a request of 0's waits for the group's end."""
    lanes = tuple(LaneInfo(shape=shape, capacity=CAPACITY) for shape in ("dp", "tp2"))
    leading = InstanceStats(shape="tp2", num_running=3, kv_blocks_used=20, block_size=64, kv_blocks_total=80)
    following = InstanceStats(shape="tp2", is_follower=True, num_paused=1)
    return replace(
        snapshot(
            replace(instance(0), stats=following, lanes=lanes),
            replace(instance(1), lanes=lanes),
            replace(instance(2), stats=leading, lanes=lanes),
        ),
        layout=Layout(epoch=Epoch(4), groups=parse_groups("dp@(1) tp2@(2,0)")),
        groups=parse_groups("tp2@(2,0)"),
        layout_since_s=880.0,
        last_switch=DONE,
    )


@pytest.mark.parametrize("view", [status_view, lambda now: top_view(None, now)], ids=["status", "top"])
def test_members_of_a_group_stand_together_the_leader_first(view):
    lines = drawn(view(merged()))
    at = {key: next(i for i, line in enumerate(lines) if f" {key} " in line) for key in ("0.0", "1.0", "2.0")}
    assert at["0.0"] == at["2.0"] + 1, lines
    assert "┌ 2.0" in lines[at["2.0"]] and "tp2 leads" in lines[at["2.0"]]
    assert "└ 0.0" in lines[at["0.0"]] and "tp2 with 2" in lines[at["0.0"]]
    assert "layout tp2@(2,0), 1 dp   auto   epoch 4" in lines[0]


@pytest.mark.parametrize("view", [status_view, lambda now: top_view(None, now)], ids=["status", "top"])
def test_a_member_that_leaves_its_group_is_shown_as_leaving_though_it_serves(view):
    lines = drawn(view(replace(merged(), leaving=(0,))))
    states = {key: next(line for line in lines if f" {key} " in line).split()[2] for key in ("0.0", "2.0")}
    assert states == {"0.0": "leaving", "2.0": "ready"}


def piped() -> ClusterSnapshot:
    """The same instances as `merged`; the two are stages of a pipeline that holds 200 blocks."""
    pp2 = LaneInfo(shape="pp2", capacity=replace(CAPACITY, num_blocks=200))
    leading = InstanceStats(shape="pp2", num_running=3, kv_blocks_used=50, block_size=32, kv_blocks_total=200)
    now = merged()
    first, alone, leader = (replace(i, lanes=(*i.lanes, pp2)) for i in now.instances)
    return replace(
        now,
        instances=(
            replace(first, stats=replace(first.stats, shape="pp2")),
            alone,
            replace(leader, stats=leading),
        ),
        layout=Layout(epoch=Epoch(5), groups=parse_groups("dp@(1) pp2@(2,0)")),
    )


def test_a_pipeline_shows_as_a_group_whose_members_have_half_of_the_parameters():
    lines = drawn(status_view(piped()))
    assert any("pp2 leads" in line for line in lines) and any("pp2 with 2" in line for line in lines)
    assert "1,600 / 6,400" in "\n".join(lines), "50 and 200 blocks of 32 tokens"
    first, alone, leader = piped().instances
    weights, kv, used = memory_parts(leader, leader)
    assert (weights, kv) == (CAPACITY.weight_bytes // 2, 100 * CAPACITY.bytes_per_block)
    assert used == 25 * CAPACITY.bytes_per_block
    assert memory_parts(first, leader) == (weights, kv, used)
    whole = (CAPACITY.weight_bytes, CAPACITY.num_blocks * CAPACITY.bytes_per_block, 0)
    assert memory_parts(alone, alone) == whole


def test_a_host_tier_shows_its_size_in_tokens():
    held = InstanceStats(device_blocks=40, device_blocks_used=30, host_blocks=300, host_blocks_used=60, num_parked=2)
    alone = replace(instance(1), stats=held)
    _, kv, used = memory_parts(alone, alone)
    assert (kv, used) == (40 * CAPACITY.bytes_per_block, 30 * CAPACITY.bytes_per_block)
    tokens = 300 * CAPACITY.block_size
    assert host_parts(alone) == (300 * CAPACITY.bytes_per_block, 60 * CAPACITY.bytes_per_block, tokens)
    assert host_parts(instance(1)) == (0, 0, 0)
    stage = replace(alone, stats=replace(held, shape="pp2", host_blocks=600))
    assert host_parts(stage) == (300 * CAPACITY.bytes_per_block, 30 * CAPACITY.bytes_per_block, 2 * tokens)
    now = replace(merged(), instances=(alone,))
    assert f"{tokens // 5:,} / {tokens:,}" in "\n".join(drawn(status_view(now)))
    assert f"20% of {tokens:,}" in "\n".join(drawn(top_view(None, now)))


def test_a_decision_tells_what_was_chosen_first_and_what_the_others_cost():
    options = [
        {"action": "keep", "group": "", "price_s": 33.6, "why": "nothing is due"},
        {"action": "drop", "group": "pp2@(0,1)", "price_s": 0.3358, "why": "memory"},
    ]
    data = {**options[1], "options": options, "needs_instances": False}
    event = Event(seq=1, time_s=0.0, kind=EventKind.PLAN_DECIDED, why="memory", data=data)
    assert event_line(event).plain.endswith("drop pp2@(0,1): 0.336 s; keep: 33.6 s   why: memory")
    short = {**options[0], "options": options[:1], "needs_instances": True}
    assert shape_views.describe_decision(short) == "keep: 33.6 s; more instances would help"


def test_why_shows_all_options_and_an_outcome_beside_its_prediction():
    figures = {"ttft_s": 0.2, "tpot_s": 0.012, "queue": 0.0, "finished": 31.0}
    options = [
        {"action": "keep", "group": "", "price_s": 0.0, "why": "nothing else pays"},
        {
            "action": "merge",
            "group": "tp2@(0,1)",
            "price_s": 0.5,
            "gain_s": 12.0,
            "why": "faster",
            "predicted": figures,
        },
    ]
    shown = "\n".join(drawn(shape_views.why_table({**options[1], "options": options})))
    assert "> merge tp2@(0,1)" in shown and "12 ms" in shown and "12 s" in shown
    outcome = {"action": "merge", "groups": "tp2@(0,1)", "predicted": figures, "measured": figures | {"ttft_s": 0.3}}
    shown = "\n".join(drawn(shape_views.outcome_table(outcome)))
    assert "measured" in shown and "0.3 s" in shown


def test_kv_is_counted_in_the_blocks_of_the_shape():
    lines = "\n".join(drawn(status_view(merged())))
    assert "1,280 / 5,120" in lines  # 20 and 80 blocks of 64 tokens
    assert "25% of 5,120" in "\n".join(drawn(top_view(None, merged())))


def test_paused_requests_have_a_column_only_while_there_are_any():
    assert any("paused" in line for line in drawn(status_view(merged())))
    assert not any("paused" in line for line in drawn(status_view(snapshot(instance(0)))))


def test_the_last_switch_tells_phases_requests_and_why():
    (line,) = [line for line in drawn(status_view(merged())) if line.startswith("switch")]
    assert "merge tp2@(2,0) (carry) done 1 min ago: meet 3.1 ms, cutover 8.2 ms; 4 carried (1.5 MiB)" in line
    assert "why: load 0.1 is below 0.25" in line
    failed = replace(merged(), last_switch=replace(DONE, phase="aborted", report=None, failure="no answer within 3 s"))
    assert any("aborted 1 min ago: no answer within 3 s" in line for line in drawn(status_view(failed)))


def test_switches_side_by_side_are_counted():
    plans = tuple(
        SwitchPlan(
            plan_id=str(group),
            epoch=Epoch(4),
            group=group,
            members=tuple(InstanceKey(instance_id=member, incarnation=1) for member in group.members),
            is_merge=True,
        )
        for group in parse_groups("tp2@(0,1) tp2@(2,3)")
    )
    assert any("(2 under way)" in line for line in drawn(status_view(replace(merged(), switching=plans))))
    assert not any("under way" in line for line in drawn(status_view(replace(merged(), switching=plans[:1]))))


def test_the_layout_says_what_can_be_formed_what_cannot_and_who_decides():
    lines = drawn(shape_views.layout_view(LayoutView.of(merged())))
    text = "\n".join(lines)
    assert "for 2 min" in text and "policy       auto" in text and "can form     tp2@(2,0)" in text
    assert ["tp2@(2,0)", "2", "0"] in [line.split() for line in lines]
    assert ["dp", "1", "-"] in [line.split() for line in lines]
    pinned = LayoutPolicy(is_auto=False, target=parse_groups("tp2@(2,0) dp@(1)"))
    cannot = (LaneInfo(shape="tp4", capacity=None, why_not="too few heads"),)
    view = replace(LayoutView.of(merged()), policy=pinned, cannot=cannot)
    text = "\n".join(drawn(shape_views.layout_view(view)))
    assert "pinned to tp2@(2,0), 1 dp" in text and "tp4: too few heads" in text


def test_the_event_of_a_switch_tells_its_phases_and_that_of_a_layout_its_groups():
    data = {"what": "merge tp2@(0,1) (carry)", "prepare_s": 0.004, "cutover_s": 0.0082, "num_paused": 2}
    end = Event(seq=1, time_s=0.0, kind=EventKind.TRANSITION_END, why="asked for", data=data)
    assert event_line(end).plain.endswith("prepare 4.0 ms, cutover 8.2 ms; 2 paused   why: asked for")
    changed = replace(end, kind=EventKind.LAYOUT_CHANGED, data={"epoch": 4, "groups": "tp2@(0,1), dp@(2)"})
    assert event_line(changed).plain.endswith("tp2@(0,1), dp@(2)   why: asked for")


@given(seconds=st.floats(min_value=0, max_value=1e6))
def test_times_are_short(seconds):
    assert len(shape_views.format_age(seconds)) <= 6
    assert shape_views.format_seconds(seconds).endswith("s")


def test_a_thousand_groups_are_not_all_named():
    groups = parse_groups(" ".join(f"tp2@({i},{i + 1})" for i in range(0, 1000, 2)))
    assert shape_views.describe_groups(groups).endswith("492 more")


def test_tenants_are_shown_with_their_shares() -> None:
    uses = [
        TenantUse(
            tenant="acme",
            service_class="default",
            num_running=2,
            share=0.75,
            total_tokens=1200,
            total_parked=17,
            total_recomputed=3,
            swapped_bytes=3 << 19,
            attainment=0.5,
        ),
        TenantUse(tenant="", service_class="flex", num_waiting=9, share=0.25),
    ]
    text = "\n".join(drawn(tenants_view(uses)))
    assert "acme" in text and "75%" in text and "1,200" in text and "50%" in text
    assert "17" in text and "1.5 MiB" in text
    assert "(none)" in text and "flex" in text
    assert "no requests yet" in "\n".join(drawn(tenants_view([])))
