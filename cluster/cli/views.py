"""How snapshots and events look in a terminal. Pure: values in, rich renderables out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pengserve.cluster.cli.shape_views import (
    by_group,
    describe_decision,
    describe_groups,
    describe_phases,
    describe_policy,
    kv_tokens,
    role,
    switch_line,
)
from pengserve.cluster.memory_parts import host_parts, leader_of, memory_parts
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.layout import Group
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceSnapshot, InstanceState
from pengserve.planners.types.tenants import TenantUse
from pengserve.planners.types.units import format_bytes

STATE_STYLES = {
    InstanceState.STARTING: "yellow",
    InstanceState.READY: "green",
    InstanceState.DRAINING: "cyan",
    InstanceState.DEAD: "red",
}
BAR_WIDTH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What an instance did between two snapshots."""

    prompt_tokens_per_s: float
    generated_tokens_per_s: float


def rates_between(before: InstanceSnapshot | None, now: InstanceSnapshot, seconds: float) -> Rates | None:
    """Tokens per second from the growth of the totals; None where there is nothing to compare with.

    Totals begin at zero with each incarnation, so two lives of a slot are never compared.
    """
    if before is None or before.key != now.key or seconds <= 0:
        return None
    prompt = now.stats.total_prompt_tokens - before.stats.total_prompt_tokens
    generated = now.stats.total_generated_tokens - before.stats.total_generated_tokens
    return Rates(prompt_tokens_per_s=prompt / seconds, generated_tokens_per_s=generated / seconds)


def hit_rate(instances: Sequence[InstanceSnapshot]) -> float | None:
    """Share of looked-up prompt tokens that were in the prefix cache, since the start; None before the first lookup."""
    queries = sum(i.stats.total_prefix_queries for i in instances)
    return sum(i.stats.total_prefix_hits for i in instances) / queries if queries else None


def predicted_rate(instances: Sequence[InstanceSnapshot]) -> float | None:
    """Share of looked-up prompt tokens that ingresses expected in the prefix cache; None before the first lookup."""
    queries = sum(i.stats.total_prefix_queries for i in instances)
    return sum(i.stats.total_prefix_predicted for i in instances) / queries if queries else None


def bar(parts: Sequence[tuple[float, str, str]], width: int = BAR_WIDTH) -> Text:
    """A bar of `width` cells. `parts` are (share of the whole, glyph, style), from the left; the rest is empty."""
    text, filled, total = Text(), 0, 0.0
    for share, glyph, style in parts:
        total += share
        cells = max(min(round(total * width), width) - filled, 0)
        if share > 0 and cells == 0 and filled < width:
            cells = 1  # a little is not nothing
        text.append(glyph * cells, style)
        filled += cells
    text.append("·" * (width - filled), "dim")
    return text


def status_view(snapshot: ClusterSnapshot) -> RenderableType:
    """The table of `pengserve status`."""
    has_paused = any(i.stats.num_paused for i in snapshot.instances)
    has_host = any(i.stats.host_blocks for i in snapshot.instances)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("instance", "state", "shape", "node", "device", "pid"):
        table.add_column(name)
    for name in (
        "KV used / total",
        *(["host used / total"] if has_host else []),
        "running",
        "waiting",
        *(["paused"] if has_paused else []),
        "prompt tok",
        "output tok",
    ):
        table.add_column(name, justify="right")
    for branch, instance, group in by_group(snapshot):
        stats = instance.stats
        used, _, total = kv_tokens(instance)
        table.add_row(
            f"{branch}{instance.key}",
            _state(instance, snapshot),
            _shape(instance, group),
            instance.device.node_ip,
            instance.device.device,
            str(instance.device.pid or "-"),
            f"{used:,} / {total:,}" if total and not stats.is_follower else "-",
            *([_host_tokens(instance)] if has_host else []),
            f"{stats.num_running:,}",
            f"{stats.num_waiting:,}",
            *([f"{stats.num_paused:,}"] if has_paused else []),
            f"{stats.total_prompt_tokens:,}",
            f"{stats.total_generated_tokens:,}",
        )
    return Lines(_headline(snapshot), _switch(snapshot), table)


def top_view(before: ClusterSnapshot | None, now: ClusterSnapshot, note: str = "") -> RenderableType:
    """One frame of `pengserve top`; `before` is an earlier snapshot, for the rates."""
    seconds = now.time_s - before.time_s if before else 0.0
    has_paused = any(i.stats.num_paused for i in now.instances)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    has_host = any(i.stats.host_blocks for i in now.instances)
    for name in ("instance", "state", "shape", "KV tokens", "memory", *(["host tokens"] if has_host else [])):
        table.add_column(name, no_wrap=True)
    for name in ("run", "wait", *(["paused"] if has_paused else []), "in/s", "out/s"):
        table.add_column(name, justify="right", no_wrap=True)
    rates = {
        i.key: rates_between(before.instance(i.instance_id) if before else None, i, seconds) for i in now.instances
    }
    for branch, instance, group in by_group(now):
        rate, stats = rates[instance.key], instance.stats
        table.add_row(
            f"{branch}{instance.key}",
            _state(instance, now),
            Text(role(instance, group), _shape_style(instance)),
            _kv_bar(instance),
            _memory_bar(instance, leader_of(now.instances, instance, group)),
            *([_host_bar(instance)] if has_host else []),
            str(stats.num_running),
            str(stats.num_waiting),
            *([str(stats.num_paused)] if has_paused else []),
            f"{rate.prompt_tokens_per_s:,.0f}" if rate else "-",
            f"{rate.generated_tokens_per_s:,.0f}" if rate else "-",
        )
    legend = Text("KV: █ resident ▒ queued   memory: █ weights ▓ KV used · KV free", "dim")
    totals = _totals(now, [r for r in rates.values() if r])
    return Lines(_headline(now), totals, _switch(now), table, legend, Text(note, "yellow"))


def tenants_view(uses: Sequence[TenantUse]) -> RenderableType:
    """One frame of `pengserve top --tenants`."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("tenant", "class"):
        table.add_column(name, no_wrap=True)
    for name in ("run", "wait", "share", "tokens", "ended", "SLO kept", "parked", "recomputed", "swapped"):
        table.add_column(name, justify="right", no_wrap=True)
    for use in uses:
        table.add_row(
            Text(use.tenant or "(none)", "dim" if not use.tenant else ""),
            use.service_class,
            str(use.num_running),
            str(use.num_waiting),
            f"{use.share:.0%}",
            f"{use.total_tokens:,}",
            f"{use.total_ended:,}",
            "-" if use.attainment is None else f"{use.attainment:.0%}",
            f"{use.total_parked:,}",
            f"{use.total_recomputed:,}",
            format_bytes(use.swapped_bytes),
        )
    return table if uses else Text("no requests yet", "dim")


def event_line(event: Event) -> Text:
    """One line of `pengserve events`."""
    style = "red" if event.kind.value.endswith(("_error", "_lost")) else "green" if "ready" in event.kind.value else ""
    clock = time.strftime("%H:%M:%S", time.localtime(event.time_s))
    return Text.assemble(
        (f"{event.seq:>5} ", "dim"),
        f"{clock} ",
        (f"{event.kind.value:<22} ", style),
        (f"{event.span:<14} ", "cyan"),
        _told(event),
    )


def _told(event: Event) -> str:
    """What happened, and why."""
    if event.kind is EventKind.TRANSITION_END:
        what = describe_phases(event.data)
    elif event.kind is EventKind.PLAN_DECIDED:
        what = describe_decision(event.data)
    elif event.kind is EventKind.LAYOUT_CHANGED:
        what = str(event.data.get("groups", ""))
    else:
        return event.why
    return f"{what}   why: {event.why}" if what else event.why


def _headline(snapshot: ClusterSnapshot) -> Text:
    ready = sum(i.state is InstanceState.READY for i in snapshot.instances)
    return Text.assemble(
        (snapshot.app, "bold"),
        f"   {ready}/{len(snapshot.instances)} ready   layout ",
        (describe_groups(snapshot.layout.groups), "bold"),
        f"   {describe_policy(snapshot.policy)}   epoch {snapshot.epoch}   routes v{snapshot.routing_version}",
    )


def _switch(snapshot: ClusterSnapshot) -> Text:
    text = Text("switch ").append_text(switch_line(snapshot.last_switch, snapshot.time_s))
    num_under_way = len(snapshot.switching)
    return text.append(f"   ({num_under_way} under way)", "dim") if num_under_way > 1 else text


def _totals(snapshot: ClusterSnapshot, rates: Sequence[Rates]) -> Text:
    stats = [i.stats for i in snapshot.instances]
    hits, predicted = hit_rate(snapshot.instances), predicted_rate(snapshot.instances)
    return Text(
        f"running {sum(s.num_running for s in stats)}   waiting {sum(s.num_waiting for s in stats)}"
        f"   prompt {sum(r.prompt_tokens_per_s for r in rates):,.0f} tok/s"
        f"   output {sum(r.generated_tokens_per_s for r in rates):,.0f} tok/s"
        f"   prefix hits {f'{hits:.0%}' if hits is not None else '-'}"
        f"{f' (predicted {predicted:.0%})' if predicted else ''}"
        f"   preempted {sum(s.total_preemptions for s in stats)}   resumed {sum(s.total_resumed for s in stats)}"
        + (f"   paused {paused}" if (paused := sum(s.num_paused for s in stats)) else "")
        + (f"   parked {parked}" if (parked := sum(s.num_parked for s in stats)) else "")
    )


def _state(instance: InstanceSnapshot, snapshot: ClusterSnapshot) -> Text:
    """One that is drained and still serves in a group is leaving, though it is ready."""
    if instance.instance_id in snapshot.leaving:
        return Text("leaving", STATE_STYLES[InstanceState.DRAINING])
    return Text(instance.state.value, STATE_STYLES[instance.state])


def _shape(instance: InstanceSnapshot, group: Group | None) -> Text:
    """What it runs, and the other shapes that it could."""
    others = [lane.shape for lane in instance.lanes if lane.capacity and lane.shape != instance.stats.shape]
    return Text.assemble(
        (role(instance, group), _shape_style(instance)), (f"  {' '.join(others)}" if others else "", "dim")
    )


def _shape_style(instance: InstanceSnapshot) -> str:
    return "" if instance.stats.shape == "dp" else "bold cyan"


def _kv_bar(instance: InstanceSnapshot) -> Text:
    used, queued, total = kv_tokens(instance)
    if not total:
        return Text("-", "dim")
    if instance.stats.is_follower:
        return Text("as its leader's", "dim")
    share = used / total
    text = bar([(share, "█", "red" if share > 0.9 else "green"), (min(queued / total, 1.0), "▒", "yellow")])
    return text.append(f" {share:4.0%} of {total:,}")


def _host_tokens(instance: InstanceSnapshot) -> str:
    """Tokens whose KV the host tier holds, and can hold."""
    host_bytes, host_used, tokens = host_parts(instance)
    return f"{tokens * host_used // host_bytes:,} / {tokens:,}" if host_bytes else "-"


def _memory_bar(instance: InstanceSnapshot, leader: InstanceSnapshot) -> Text:
    """A follower holds as many bytes of its leader's requests as the leader does: its heads or layers of each block."""
    if instance.capacity is None:
        return Text("-", "dim")
    weight_bytes, kv_bytes, used_bytes = memory_parts(instance, leader)
    whole = max(weight_bytes + kv_bytes, 1)
    text = bar([(weight_bytes / whole, "█", "blue"), (used_bytes / whole, "▓", "green")])
    return text.append(f" {format_bytes(weight_bytes)} + {format_bytes(kv_bytes)}")


def _host_bar(instance: InstanceSnapshot) -> Text:
    """How full the host tier is."""
    host_bytes, host_used, tokens = host_parts(instance)
    if not host_bytes:
        return Text("-", "dim")
    share = host_used / host_bytes
    return bar([(share, "▓", "green")]).append(f" {share:4.0%} of {tokens:,}")
