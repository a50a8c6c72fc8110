"""Laws of whole simulations, under each policy, strategy and fault."""

import random

import pytest

from pengserve.planners.types.events import EventKind
from pengserve.planners.types.snapshot import InstanceState, InstanceStats
from pengserve.simulator.config import SimulationConfig
from pengserve.simulator.engine.group import SimGroup
from pengserve.simulator.engine.switches import drop as switches_drop
from pengserve.simulator.engine.switches.switch import SimSwitch
from pengserve.simulator.requests import Arrival
from pengserve.simulator.result import Result
from pengserve.simulator.run import Simulation
from tests.simulator.machines import config_of, poisson, simulate_small, simulation_of

SHORT_OF_KV = 8_000  # tokens of an instance, for which 20 requests a second are too many

CASES = {
    "vllm_dp": config_of("vllm_dp"),
    "vllm_tp": config_of("vllm_tp"),
    "vllm_pp": config_of("vllm_pp"),
    "swap": config_of("swap"),
    **{
        f"{name}-death": config_of(name, cluster={"start_s": 2, "instances": 4}, deaths=[{"instance": 1, "at_s": 5.01}])
        for name in ("vllm_tp", "vllm_pp")
    },
    "migration": config_of(
        "migration", {"interval_s": 0.2, "full_above": 0.5, "free_below": 0.5}, cluster={"instances": 4}
    ),
    "drops": config_of(cluster={"max_stages": 2}),
    "drops-4": config_of(cluster={"max_stages": 4, "instances": 4}),
    "merges": config_of(cluster={"degrees": [2]}),
    "both": config_of(cluster={"degrees": [2, 4], "max_stages": 4, "instances": 4}),
    "by-priority": config_of(cluster={"degrees": [2], "scheduling": "priority"}),
    **{
        f"asked-{strategy}": config_of(
            cluster={"degrees": [2]},
            layouts=[
                {"at_s": 3, "layout": "tp2", "strategy": strategy},
                {"at_s": 9, "layout": "dp", "strategy": strategy},
                {"at_s": 12, "layout": "auto"},
            ],
        )
        for strategy in ("sequential", "soft", "hard", "carry")
    },
    "asked-pipelines": config_of(
        cluster={"max_stages": 2}, layouts=[{"at_s": at, "layout": "pp2" if at % 4 else "dp"} for at in range(2, 20, 2)]
    ),
    "deaths": config_of(
        cluster={"degrees": [2], "max_stages": 2, "start_s": 2},
        deaths=[{"instance": i % 2, "at_s": at} for i, at in enumerate((4, 9, 14.03, 18))],
        layouts=[{"at_s": 2, "layout": "tp2"}, {"at_s": 7.9, "layout": "pp2"}, {"at_s": 13, "layout": "auto"}],
    ),
}


def mixed_load(count: int = 300) -> list[Arrival]:
    """Ordinary requests, urgent ones, and such as ask for a shape."""
    urgent = poisson(count // 20, 1, seed=5, name="urgent", priority=-1)
    wide = poisson(count // 20, 1, seed=6, name="wide", degree=2)
    return sorted([*poisson(count, 20), *urgent, *wide], key=lambda arrival: arrival.at_s)


def burst() -> list[Arrival]:
    """Quiet, then more than memory holds, then quiet."""
    parts = [
        poisson(40, 2),
        poisson(250, 30, seed=2, start_s=20, name="b"),
        poisson(40, 2, seed=3, start_s=30, name="c"),
    ]
    return [arrival for part in parts for arrival in part]


def switches(result: Result) -> list[str]:
    """What switched, in order."""
    return [str(e.data["switch"]) for e in result.events if e.kind is EventKind.TRANSITION_END]


def leftovers(simulation: Simulation) -> list[str]:
    """What is still held when everything has ended."""
    found = []
    for instance in simulation.cluster.living():
        if instance.state is InstanceState.READY:
            lanes = [instance.lane, *([instance.group.lane] if instance.group else [])]
            for lane in lanes:
                scheduler = lane.scheduler
                if scheduler.num_free != scheduler.num_blocks or scheduler.running or scheduler.waiting:
                    found.append(f"{instance.key}: {scheduler.num_blocks - scheduler.num_free} blocks")
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_request_ends_once_with_its_tokens_and_gives_back_its_blocks(name: str) -> None:
    arrivals = mixed_load()
    simulation = simulation_of(CASES[name], arrivals, kv_tokens=SHORT_OF_KV)
    result = simulation.run_to_end()
    assert [o.request_id for o in result.outcomes] == [a.request_id for a in arrivals]
    assert [(o.output_tokens, o.refused) for o in result.outcomes] == [(a.output_tokens, "") for a in arrivals]
    assert all(o.arrived_s <= o.scheduled_s < o.first_token_s <= o.end_s for o in result.outcomes)  # type: ignore[operator]
    assert leftovers(simulation) == []
    assert sum(moment.generated_tokens for moment in result.moments) == sum(a.output_tokens for a in arrivals)


@pytest.mark.parametrize("name", ["asked-carry", "asked-soft", "asked-pipelines"])
def test_totals_of_an_instance_are_those_of_all_its_lanes_as_they_are_in_production(name: str) -> None:
    """The judge learns lengths of answers from them: a total that fell and rose with the shape told it of 100,000."""
    arrivals = mixed_load()
    simulation = simulation_of(CASES[name], arrivals, kv_tokens=SHORT_OF_KV)
    assert switches(simulation.run_to_end())
    stats = [instance.stats() for instance in simulation.cluster.living()]
    made = sum(arrival.output_tokens for arrival in arrivals)
    assert sum(s.total_generated_tokens for s in stats) == sum(s.total_finished_tokens for s in stats) == made
    assert all(s.total_costed_steps <= s.step for s in stats)


def random_history(seed: int) -> SimulationConfig:
    """Layouts that follow each other at any time, and deaths between them."""
    draw = random.Random(seed)
    shapes = ["dp", "tp2", "tp4", "pp2", "pp4", "tp2@(0,1)", "tp2@(2,3) pp2@(0,1)", "pp2@(2,3)", "auto"]
    strategies = ["carry", "carry", "hard", "soft", "sequential"]
    layouts = [
        {"at_s": draw.uniform(0, 16), "layout": draw.choice(shapes), "strategy": draw.choice(strategies)}
        for _ in range(draw.randint(2, 12))
    ]
    deaths = [{"at_s": draw.uniform(0, 16), "instance": draw.randrange(4)} for _ in range(draw.randint(0, 4))]
    cluster = {"instances": 4, "degrees": [2, 4], "max_stages": 4, "start_s": 1.0, "gpus_per_node": draw.choice([4, 8])}
    layouts.append({"at_s": 30.0, "layout": "dp"})  # what a hard merge has paused waits for its end, as it should
    return config_of(cluster=cluster, layouts=layouts, deaths=deaths)


@pytest.mark.parametrize("seed", range(10))
def test_no_history_of_layouts_and_deaths_loses_a_request_or_a_block(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    arrivals = mixed_load(200)
    simulation = simulation_of(random_history(seed), arrivals, kv_tokens=SHORT_OF_KV)
    result = simulation.run_to_end()
    assert [(o.output_tokens, o.refused) for o in result.outcomes] == [(a.output_tokens, "") for a in arrivals]
    assert leftovers(simulation) == []
    assert not [record for record in caplog.records if record.levelname == "ERROR"]  # the controller survives its own


@pytest.mark.slow
@pytest.mark.parametrize("name", ["drops-4", "both", "deaths", "migration"])
def test_the_same_seed_gives_the_same_result(name: str) -> None:
    first, second = (simulate_small(CASES[name], mixed_load(), kv_tokens=SHORT_OF_KV) for _ in range(2))
    assert repr(first) == repr(second)


@pytest.mark.slow
def test_vllms_own_scheduler_keeps_the_same_laws() -> None:
    arrivals = mixed_load(100)
    config = config_of(
        cluster={"degrees": [2], "max_stages": 2},
        scheduler="vllm",
        layouts=[{"at_s": 1, "layout": "tp2"}, {"at_s": 2.5, "layout": "pp2"}, {"at_s": 5, "layout": "dp"}],
    )
    simulation = simulation_of(config, arrivals, kv_tokens=SHORT_OF_KV)
    result = simulation.run_to_end()
    assert [(o.output_tokens, o.refused) for o in result.outcomes] == [(a.output_tokens, "") for a in arrivals]
    assert switches(result)[:4] == ["merge", "split", "drop", "restore"]
    assert leftovers(simulation) == []


def test_a_burst_is_met_by_a_drop_and_undone_by_a_restore() -> None:
    result = simulate_small(config_of(cluster={"max_stages": 2}), burst(), kv_tokens=SHORT_OF_KV)
    assert switches(result) == ["drop", "restore"]


def test_a_drop_makes_a_burst_wait_less() -> None:
    alone, dropped = (
        simulate_small(config_of(name, cluster={"max_stages": 2}), burst(), kv_tokens=SHORT_OF_KV)
        for name in ("vllm_dp", "pengserve")
    )
    assert sum(o.ttft_s or 0 for o in dropped.outcomes) < 0.5 * sum(o.ttft_s or 0 for o in alone.outcomes)


def test_requests_whose_kv_is_on_its_way_after_a_drop_are_in_the_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in production, see tests/replicas/engine/test_arrivals.py: the load of the group would look gone."""
    found: list[tuple[list[int], InstanceStats]] = []
    begun = switches_drop._exchange

    async def noted(switch: SimSwitch, run: SimGroup, pairs: dict[tuple[int, int], int]) -> None:
        found.append(([t.request.num_tokens for t in run.arriving], run.leader.stats()))
        await begun(switch, run, pairs)

    monkeypatch.setattr(switches_drop, "_exchange", noted)
    simulate_small(config_of(cluster={"max_stages": 2}, layouts=[{"at_s": 3, "layout": "pp2"}]), poisson(100, 10))
    ((tokens, stats),) = found
    assert stats.num_holding == len(tokens) > 0 and stats.longest_tokens == max(tokens)
    assert stats.num_waiting >= stats.num_holding and stats.num_running == 0 < stats.kv_blocks_used


def test_carried_requests_are_not_computed_again() -> None:
    config = config_of(cluster={"max_stages": 2}, layouts=[{"at_s": 3, "layout": "pp2"}, {"at_s": 9, "layout": "dp"}])
    result = simulate_small(config, poisson(200, 10))
    reports = [e.data for e in result.events if e.kind is EventKind.TRANSITION_END]
    assert all(report["num_carried"] > 0 and report["num_recomputed"] == 0 for report in reports)
    assert sum(o.num_preemptions for o in result.outcomes) == 0


@pytest.mark.parametrize("at_s", [5.0, 6.0, 7.0, 9.0])  # at 3 of 29 instants one of 28 has no block left in the group
def test_what_runs_in_full_instances_is_carried_into_the_group(at_s: float) -> None:
    config = config_of(
        options={"merge": {"is_auto": False}}, cluster={"degrees": [2]}, layouts=[{"at_s": at_s, "layout": "tp2"}]
    )
    result = simulate_small(config, poisson(200, 30), kv_tokens=SHORT_OF_KV)
    (report,) = (e.data for e in result.events if e.kind is EventKind.TRANSITION_END)
    assert report["num_carried"] > 20 and report["num_recomputed"] == 0


def test_pipelines_grow_and_are_cut_with_what_runs() -> None:
    asked = ((3, "pp2"), (5, "pp4"), (8, "pp2@(0,1)"), (10, "pp4"), (13, "dp"))
    layouts = [{"at_s": at_s, "layout": layout} for at_s, layout in asked]
    # By the least load all instances are equally full, so that the pairs are dropped in their order.
    options = {"dispatch": "load", "drop": {"is_auto": False}}
    config = config_of(options=options, cluster={"instances": 4, "max_stages": 4}, layouts=layouts)
    result = simulate_small(config, poisson(300, 18))
    reports = [e.data for e in result.events if e.kind is EventKind.TRANSITION_END]
    assert [report["parts"] for report in reports] == [
        *("dp@(0) dp@(1)", "dp@(2) dp@(3)", "pp2@(0,1) pp2@(2,3)"),
        *("pp2@(0,1) dp@(2) dp@(3)", "pp2@(0,1) dp@(2) dp@(3)", "dp@(0) dp@(1) dp@(2) dp@(3)"),
    ]
    assert all(report["num_carried"] > 0 and report["num_recomputed"] == 0 for report in reports)


@pytest.mark.parametrize("scheduler", ["fast", "vllm"])
def test_pairs_become_a_group_of_four_in_one_switch(scheduler: str) -> None:
    asked = ((3, "tp2"), (5, "tp4"), (8, "tp2@(0,1)"), (10, "tp4"), (13, "dp"))
    options = {"dispatch": "load", "merge": {"is_auto": False}}
    config = config_of(
        options=options,
        cluster={"instances": 4, "degrees": [2, 4]},
        scheduler=scheduler,
        layouts=[{"at_s": at_s, "layout": layout} for at_s, layout in asked],
    )
    simulation = simulation_of(config, poisson(300, 18))
    result = simulation.run_to_end()
    reports = [e.data for e in result.events if e.kind is EventKind.TRANSITION_END]
    made = [(verb, report["parts"]) for verb, report in zip(switches(result), reports, strict=True)]
    assert sorted(made[:2]) == [("merge", "dp@(0) dp@(1)"), ("merge", "dp@(2) dp@(3)")]
    assert made[2:] == [
        *(("merge", "tp2@(0,1) tp2@(2,3)"), ("split", "dp@(0) dp@(1) dp@(2) dp@(3)"), ("merge", "dp@(0) dp@(1)")),
        *(("merge", "tp2@(0,1) dp@(2) dp@(3)"), ("split", "dp@(0) dp@(1) dp@(2) dp@(3)")),
    ]
    assert all(report["num_carried"] > 0 and report["num_recomputed"] == 0 for report in reports)
    assert sum(o.num_preemptions for o in result.outcomes) == 0 and leftovers(simulation) == []


def test_a_hard_merge_pauses_what_runs_until_the_split() -> None:
    config = config_of(
        options={"merge": {"is_auto": False}},
        cluster={"degrees": [2]},
        layouts=[{"at_s": 3, "layout": "tp2", "strategy": "hard"}, {"at_s": 6, "layout": "dp"}],
    )
    early = [Arrival(request_id=f"r{i}", at_s=2.9, prompt_tokens=100, output_tokens=200) for i in range(4)]
    late = Arrival(request_id="late", at_s=3.5, prompt_tokens=100, output_tokens=50)
    result = simulate_small(config, [*early, late])
    assert all(o.longest_gap_s > 2.5 for o in result.outcomes[:4])
    assert result.outcomes[4].end_s is not None and result.outcomes[4].end_s < 6
    reports = [event.data for event in result.events if event.kind is EventKind.TRANSITION_END]
    assert [report["num_paused"] for report in reports] == [4, 0], "of both instances"


def test_a_death_is_seen_replaced_and_resumed() -> None:
    config = config_of("vllm_dp", cluster={"start_s": 3}, deaths=[{"instance": 1, "at_s": 5}])
    result = simulate_small(config, poisson(200, 10))
    kinds = [e.kind for e in result.events if e.time_s > 0]
    assert kinds.count(EventKind.INSTANCE_LOST) == 1 and kinds.count(EventKind.INSTANCE_READY) == 1


def test_a_request_that_no_shape_holds_is_refused_with_a_sentence() -> None:
    long = Arrival(request_id="long", at_s=1, prompt_tokens=9_000, output_tokens=10)
    result = simulate_small(config_of("vllm_dp"), [*poisson(5, 1), long])
    refused = {o.request_id: o.refused for o in result.outcomes if o.refused}
    assert list(refused) == ["long"] and "9010 tokens" in refused["long"]


def test_a_long_request_waits_for_the_group_that_holds_it() -> None:
    long = Arrival(request_id="long", at_s=1, prompt_tokens=7_000, output_tokens=100)
    result = simulate_small(config_of(cluster={"degrees": [2]}), [*poisson(30, 3), long], kv_tokens=4_000)
    assert not any(o.refused for o in result.outcomes) and switches(result)[0] == "merge"


def test_a_horizon_ends_a_run_and_says_what_had_not_ended() -> None:
    result = simulate_small(config_of("vllm_dp", horizon_s=5.0), poisson(200, 20))
    assert result.end_s == pytest.approx(5.0) and any(o.refused for o in result.outcomes)


def test_admission_refuses_what_does_not_fit_the_queue() -> None:
    config = config_of("vllm_dp", cluster={"max_num_seqs": 4}, limits={"max_queued_requests": 2})
    result = simulate_small(
        config, [Arrival(request_id=f"r{i}", at_s=0, prompt_tokens=9, output_tokens=9) for i in range(20)]
    )
    assert sum(bool(o.refused) for o in result.outcomes) == 20 - 2 * 4 - 2


def test_moments_tell_the_layout_and_come_at_regular_times() -> None:
    config = config_of(cluster={"max_stages": 2}, layouts=[{"at_s": 3, "layout": "pp2"}], sample_s=0.5)
    result = simulate_small(config, poisson(100, 10))
    assert result.moments[0].groups == "dp@(0) dp@(1)" and result.moments[-1].groups == "pp2@(0,1)"
    assert [m.at_s for m in result.moments[:-1]] == pytest.approx([0.5 * i for i in range(len(result.moments) - 1)])
    assert len(result.instance_kv) == len(result.moments)


def test_time_before_an_instance_has_a_request_is_added_to_its_first_token_and_to_nothing_else() -> None:
    load = poisson(60, 4)
    at_once, later = (
        simulate_small(config_of("vllm_dp", cluster={"request_s": request_s}), load) for request_s in (0.0, 0.25)
    )
    for one, other in zip(at_once.outcomes, later.outcomes, strict=True):
        assert one.ttft_s is not None and one.tpot_s is not None
        assert other.ttft_s == pytest.approx(one.ttft_s + 0.25)
        assert other.tpot_s == pytest.approx(one.tpot_s)


def test_static_layouts_stand_before_the_first_request() -> None:
    result = simulate_small(config_of("vllm_tp", {"degree": 4}, cluster={"instances": 4}), poisson(20, 10))
    assert {m.groups for m in result.moments} == {"tp4@(0,1,2,3)"}


def test_a_configuration_survives_its_result() -> None:
    config = config_of(cluster={"max_stages": 2}, deaths=[{"instance": 0, "at_s": 1}])
    result = simulate_small(config, poisson(5, 10))
    assert SimulationConfig.parse(result.config).model_dump() == config.model_dump()


def test_what_waits_goes_where_it_can_begin() -> None:
    """Long answers and short ones come in turn, so that one of two instances has the long ones and no room for more."""
    arrivals = [
        Arrival(request_id=str(i), at_s=0.01 * i, prompt_tokens=500, output_tokens=20 if i % 2 else 600)
        for i in range(60)
    ]
    cluster, layouts = {"degrees": [2]}, [{"at_s": 0.0, "layout": "dp"}]
    waits_s = {}
    for redirect in (False, True):
        config = config_of("pengserve", {"redirect": redirect}, cluster=cluster, layouts=layouts)
        result = simulate_small(config, arrivals, kv_tokens=SHORT_OF_KV)
        assert [o.output_tokens for o in result.outcomes] == [a.output_tokens for a in arrivals]
        waits_s[redirect] = [o.first_token_s - o.arrived_s for o in result.outcomes if o.first_token_s is not None]
    assert sum(waits_s[True]) < 0.8 * sum(waits_s[False]) and max(waits_s[True]) < 0.8 * max(waits_s[False])
