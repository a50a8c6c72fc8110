"""How the shape of a cluster looks in a terminal: groups, switches and their phases. Pure, as `views.py` is."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.plans import SwitchReport
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceSnapshot, LayoutPolicy, LayoutView, SwitchRecord
from pengserve.planners.types.units import format_bytes

PHASE_STYLES = {"prepare": "yellow", "commit": "yellow", "done": "green", "aborted": "red"}
SHOWN_GROUPS = 8
_PHASES = ("prepare_s", "drain_s", "meet_s", "cutover_s")
_COUNTS = ("num_carried", "num_recomputed", "num_paused", "num_redirected")


def by_group(snapshot: ClusterSnapshot) -> list[tuple[str, InstanceSnapshot, Group | None]]:
    """All instances, the members of a group one below the other: (its branch of a drawn tree, instance, group)."""
    instances = {i.instance_id: i for i in snapshot.instances}
    rows: list[tuple[str, InstanceSnapshot, Group | None]] = []
    for group in sorted(snapshot.layout.groups, key=lambda group: min(group.members)):
        members = [member for member in group.members if member in instances]
        for place, member in enumerate(members):
            rows.append((_branch(place, len(members)), instances.pop(member), group))
    return rows + [("", instance, None) for instance in instances.values()]


def role(instance: InstanceSnapshot, group: Group | None) -> str:
    """What an instance does in its group: "dp", "tp2 leads", "tp2 with 0"."""
    if group is None or group.kind is GroupKind.DP:
        return instance.stats.shape
    leads = group.leader == instance.instance_id
    return f"{group.shape} leads" if leads else f"{group.shape} with {group.leader}"


def describe_groups(groups: Iterable[Group]) -> str:
    """Groups by name, and how many instances are alone: "tp2@(0,1), 2 dp"."""
    groups = tuple(groups)
    named = [str(group) for group in groups if group.kind is not GroupKind.DP]
    more = [f"{len(named) - SHOWN_GROUPS} more"] if len(named) > SHOWN_GROUPS else []
    alone = [f"{len(groups) - len(named)} dp"] if len(named) < len(groups) else []
    return ", ".join(named[:SHOWN_GROUPS] + more + alone) or "none"


def describe_policy(policy: LayoutPolicy) -> str:
    """Who decides: "auto", "pinned", "pinned to tp2@(0,1)", or "fixed"."""
    if policy.is_auto:
        return "auto"
    return f"pinned to {describe_groups(policy.target)}" if policy.target else "fixed"


def format_seconds(seconds: float) -> str:
    """`0.0031 -> '3.1 ms'`, `2.5 -> '2.50 s'`."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def format_age(seconds: float) -> str:
    """`75 -> '1 min'`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def describe_phases(data: Mapping[str, Any]) -> str:
    """Phases and requests of a switch, e.g. "meet 3.1 ms, cutover 8.2 ms; 4 carried (1.2 MiB)".

    `data` has fields of `SwitchReport`, or is that of its TRANSITION_END.
    """
    phases = [f"{name.removesuffix('_s')} {format_seconds(data[name])}" for name in _PHASES if data.get(name)]
    counts = []
    for name in _COUNTS:
        if number := data.get(name):
            num_bytes = data.get("carried_bytes", 0) if name == "num_carried" else 0
            size = f" ({format_bytes(num_bytes)})" if num_bytes else ""  # none where all KV stayed where it was
            counts.append(f"{number:,} {name.removeprefix('num_')}{size}")
    return "; ".join(part for part in (", ".join(phases), ", ".join(counts)) if part)


def describe_decision(data: Mapping[str, Any]) -> str:
    """What a decision chose, then what it left, with what requests stall: "drop pp2@(0,1): 0.3 s; keep: 9 s"."""
    chosen = (data.get("action"), data.get("group"))
    options = sorted(data.get("options", ()), key=lambda o: (o["action"], o["group"]) != chosen)
    told = [f"{o['action']} {o['group']}".strip() + f": {_price(o)}" for o in options[:SHOWN_GROUPS]]
    more = ["more instances would help"] if data.get("needs_instances") else []
    return "; ".join(told + more)


def _price(option: Mapping[str, Any]) -> str:
    """What an option costs, and where that was predicted, what it gains."""
    gains = f", gains {option['gain_s']:.3g} s" if option.get("gain_s") else ""
    return f"{option['price_s']:.3g} s{gains}"


def why_table(data: Mapping[str, Any]) -> Table:
    """All options of a decision with what was predicted of each, the chosen one marked."""
    table = Table(box=None, padding=(0, 2, 0, 6), header_style="dim")
    table.add_column("option")
    for name in ("price", "gain", "TTFT", "TPOT", "queue", "ended", "recomputed"):
        table.add_column(name, justify="right")
    chosen = (data.get("action"), data.get("group"))
    for option in data.get("options", ()):
        mark = "> " if (option["action"], option["group"]) == chosen else "  "
        name = f"{mark}{option['action']} {option['group']}".rstrip()
        figures = _figure_cells(option.get("predicted") or {})
        table.add_row(name, f"{option['price_s']:.3g} s", f"{option.get('gain_s', 0.0):.3g} s", *figures)
    return table


def outcome_table(data: Mapping[str, Any]) -> Table:
    """What was predicted of a change, and what was measured after its horizon."""
    table = Table(box=None, padding=(0, 2, 0, 6), header_style="dim")
    table.add_column(f"{data.get('action', '')} {data.get('groups', '')}".strip())
    for name in ("TTFT", "TPOT", "queue", "ended"):
        table.add_column(name, justify="right")
    for name in ("predicted", "measured"):
        table.add_row(name, *_figure_cells(data.get(name) or {})[:4])
    return table


def _figure_cells(figures: Mapping[str, Any]) -> list[str]:
    """TTFT, TPOT, queue, ended, recomputed tokens; a dash where nothing was predicted."""
    if not figures:
        return ["-"] * 5
    seconds = [f"{figures['ttft_s']:.3g} s", f"{figures['tpot_s'] * 1e3:.3g} ms"]
    counts = [figures["queue"], figures["finished"], figures.get("recomputed_tokens", 0)]
    return [*seconds, *(f"{count:,.0f}" for count in counts)]


def switch_line(record: SwitchRecord | None, time_s: float) -> Text:
    """The newest switch: what, how it goes or went, its phases, and why."""
    if record is None:
        return Text("no switch yet", "dim")
    age_s = time_s - record.started_s
    state = f"{record.phase} {format_age(age_s)} ago" if record.phase in ("done", "aborted") else record.phase
    text = Text.assemble(f"{record.what} ", (state, PHASE_STYLES.get(record.phase, "")))
    if record.report is not None:
        text.append(f": {describe_phases(_fields(record.report))}")
    if record.failure:
        text.append(f": {record.failure}", "red")
    return text.append(f"   why: {record.why}", "dim") if record.why else text


def layout_view(view: LayoutView) -> RenderableType:
    """What `pengserve layout` shows."""
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    age = format_age(view.time_s - view.layout_since_s) if view.layout_since_s else "?"
    facts.add_row("layout", f"{describe_groups(view.layout.groups)}   epoch {view.layout.epoch}, for {age}")
    facts.add_row("policy", _policy_sentence(view.policy))
    facts.add_row("can form", describe_groups(view.formable))
    for lane in view.cannot:
        facts.add_row("cannot", Text.assemble((lane.shape, "yellow"), f": {lane.why_not}"))
    facts.add_row("last switch", switch_line(view.last_switch, view.time_s))
    groups = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("group", "leader", "followers"):
        groups.add_column(name)
    for group in view.layout.groups:
        if group.kind is not GroupKind.DP:
            groups.add_row(str(group), str(group.leader), ", ".join(map(str, group.members[1:])))
    alone = [str(group.leader) for group in view.layout.groups if group.kind is GroupKind.DP]
    if alone:
        groups.add_row("dp", ", ".join(alone), "-")
    return Lines(facts, groups)


def kv_tokens(instance: InstanceSnapshot) -> tuple[int, int, int]:
    """Tokens of KV in an instance's shape: (used, queued for, in all); all zero until it is known."""
    capacity, stats = instance.capacity, instance.stats
    if capacity is None:
        return 0, 0, 0
    size = stats.block_size or capacity.block_size
    return stats.kv_blocks_used * size, stats.queued_tokens, (stats.kv_blocks_total or capacity.num_blocks) * size


def _policy_sentence(policy: LayoutPolicy) -> str:
    if policy.is_auto:
        return "auto: the cluster follows its load (`pengserve layout set` pins it)"
    return f"{describe_policy(policy)}: it stays so until `pengserve layout auto`"


def _fields(report: SwitchReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in (*_PHASES[1:], *_COUNTS, "carried_bytes")}


def _branch(place: int, count: int) -> str:
    if count == 1:
        return ""
    return "┌ " if place == 0 else "└ " if place == count - 1 else "├ "
