"""How snapshots and events look in a terminal. Pure: values in, rich renderables out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pengserve.planners.types.events import Event
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceSnapshot, InstanceState
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
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("instance", "state", "lanes", "node", "device", "pid"):
        table.add_column(name)
    for name in ("KV used / total", "running", "waiting", "prompt tok", "output tok"):
        table.add_column(name, justify="right")
    for instance in snapshot.instances:
        stats, capacity = instance.stats, instance.capacity
        kv = f"{stats.kv_blocks_used * capacity.block_size:,} / {capacity.num_tokens:,}" if capacity else "-"
        table.add_row(
            str(instance.key),
            Text(instance.state.value, STATE_STYLES[instance.state]),
            _lanes(instance),
            instance.device.node_ip,
            instance.device.device,
            str(instance.device.pid or "-"),
            kv,
            f"{stats.num_running:,}",
            f"{stats.num_waiting:,}",
            f"{stats.total_prompt_tokens:,}",
            f"{stats.total_generated_tokens:,}",
        )
    return Group(_headline(snapshot), table)


def top_view(before: ClusterSnapshot | None, now: ClusterSnapshot, note: str = "") -> RenderableType:
    """One frame of `pengserve top`; `before` is an earlier snapshot, for the rates."""
    seconds = now.time_s - before.time_s if before else 0.0
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("instance", "state", "lanes", "KV tokens", "memory"):
        table.add_column(name, no_wrap=True)
    for name in ("run", "wait", "in/s", "out/s"):
        table.add_column(name, justify="right", no_wrap=True)
    rates = {
        i.key: rates_between(before.instance(i.instance_id) if before else None, i, seconds) for i in now.instances
    }
    for instance in now.instances:
        rate = rates[instance.key]
        table.add_row(
            str(instance.key),
            Text(instance.state.value, STATE_STYLES[instance.state]),
            _lanes(instance),
            _kv_bar(instance),
            _memory_bar(instance),
            str(instance.stats.num_running),
            str(instance.stats.num_waiting),
            f"{rate.prompt_tokens_per_s:,.0f}" if rate else "-",
            f"{rate.generated_tokens_per_s:,.0f}" if rate else "-",
        )
    legend = Text("KV: █ resident ▒ queued   memory: █ weights ▓ KV used · KV free", "dim")
    return Group(_headline(now), _totals(now, [r for r in rates.values() if r]), table, legend, Text(note, "yellow"))


def event_line(event: Event) -> Text:
    """One line of `pengserve events`."""
    style = "red" if event.kind.value.endswith(("_error", "_lost")) else "green" if "ready" in event.kind.value else ""
    clock = time.strftime("%H:%M:%S", time.localtime(event.time_s))
    return Text.assemble(
        (f"{event.seq:>5} ", "dim"),
        f"{clock} ",
        (f"{event.kind.value:<22} ", style),
        (f"{event.span:<14} ", "cyan"),
        event.why,
    )


def _headline(snapshot: ClusterSnapshot) -> Text:
    ready = sum(i.state is InstanceState.READY for i in snapshot.instances)
    groups = " ".join(str(group) for group in snapshot.layout.groups) or "none"
    return Text.assemble(
        (snapshot.app, "bold"),
        f"   {ready}/{len(snapshot.instances)} ready   layout {groups}   epoch {snapshot.epoch}"
        f"   routes v{snapshot.routing_version}",
    )


def _totals(snapshot: ClusterSnapshot, rates: Sequence[Rates]) -> Text:
    stats = [i.stats for i in snapshot.instances]
    hits = hit_rate(snapshot.instances)
    return Text(
        f"running {sum(s.num_running for s in stats)}   waiting {sum(s.num_waiting for s in stats)}"
        f"   prompt {sum(r.prompt_tokens_per_s for r in rates):,.0f} tok/s"
        f"   output {sum(r.generated_tokens_per_s for r in rates):,.0f} tok/s"
        f"   prefix hits {f'{hits:.0%}' if hits is not None else '-'}"
        f"   preempted {sum(s.total_preemptions for s in stats)}   resumed {sum(s.total_resumed for s in stats)}"
    )


def _lanes(instance: InstanceSnapshot) -> Text:
    shape = instance.stats.shape
    shapes = [lane.shape for lane in instance.lanes if lane.capacity is not None] or ["dp"]
    return Text(" ").join(Text(lane, "bold" if lane == shape else "dim") for lane in shapes)


def _kv_bar(instance: InstanceSnapshot) -> Text:
    capacity, stats = instance.capacity, instance.stats
    if capacity is None or capacity.num_blocks == 0:
        return Text("-", "dim")
    used = stats.kv_blocks_used / capacity.num_blocks
    queued = (instance.virtual_kv_blocks - stats.kv_blocks_used) / capacity.num_blocks
    style = "red" if used > 0.9 else "green"
    text = bar([(used, "█", style), (min(queued, 1.0), "▒", "yellow")])
    return text.append(f" {used:4.0%} of {capacity.num_tokens:,}")


def _memory_bar(instance: InstanceSnapshot) -> Text:
    capacity = instance.capacity
    if capacity is None:
        return Text("-", "dim")
    kv_bytes = capacity.num_blocks * capacity.bytes_per_block
    used_bytes = instance.stats.kv_blocks_used * capacity.bytes_per_block
    whole = max(capacity.weight_bytes + kv_bytes, 1)
    text = bar([(capacity.weight_bytes / whole, "█", "blue"), (used_bytes / whole, "▓", "green")])
    return text.append(f" {format_bytes(capacity.weight_bytes)} + {format_bytes(kv_bytes)}")
