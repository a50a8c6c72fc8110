"""`pengserve layout`: shows the shape of the cluster, and changes it."""

import time
from collections.abc import Iterator

from rich.console import Console

from pengserve.client import PengServe, PengServeConnectionError, PengServeTimeoutError
from pengserve.cluster.cli.output import output_console, print_value
from pengserve.cluster.cli.progress import Steps
from pengserve.cluster.cli.shape_views import describe_groups, describe_phases, describe_policy, layout_view
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.snapshot import LayoutView

EVENT_PAGE = 1000
PERIOD_S = 0.1
_SWITCHES = (EventKind.TRANSITION_START, EventKind.TRANSITION_END, EventKind.TRANSITION_ERROR)


def run_layout(url: str, admin_key: str | None, as_json: bool) -> None:
    """Print the layout once."""
    with PengServe(url, admin_key=admin_key) as client:
        view = client.layout()
    print_value(view, layout_view, as_json)


def run_layout_auto(url: str, admin_key: str | None) -> None:
    """Hand the layout over to the planner."""
    with PengServe(url, admin_key=admin_key) as client:
        view = client.auto_layout()
    _print_layout(view)


def run_layout_set(url: str, admin_key: str | None, layout: str, strategy: str, wait: bool, timeout_s: float) -> None:
    """Ask for a layout; with `wait`, show each switch on the way to it.

    Raises:
        PengServeAPIError: it was refused. PengServeTimeoutError: it does not stand within `timeout_s`.
    """
    with PengServe(url, admin_key=admin_key) as client:
        after = _newest_event(client) if wait else 0
        view = client.set_layout(layout, strategy, wait=False)
        if wait and not view.policy.is_auto:
            with Steps(Console(stderr=True)) as steps:
                view = _watch(client, view, after, steps, timeout_s)
    _print_layout(view)


def _watch(client: PengServe, view: LayoutView, after: int, steps: Steps, timeout_s: float) -> LayoutView:
    deadline_s = time.monotonic() + timeout_s
    wanted, failure = set(view.policy.target), ""
    while True:
        # Seen first, so that all switches that led to a layout that stands are shown.
        stands = set(view.layout.groups) == wanted
        for event in _events(client, after):
            after = event.seq
            failure = _show(event, steps) or failure
        if stands:
            return view
        if set(view.policy.target) != wanted:
            raise PengServeTimeoutError("another layout was asked for since; `pengserve layout` shows which")
        if time.monotonic() > deadline_s:
            why = f" ({failure})" if failure else ""
            raise PengServeTimeoutError(f"no such layout after {timeout_s:g} s{why}; the cluster goes on trying")
        time.sleep(PERIOD_S)
        try:
            view = client.layout()
        except PengServeConnectionError as error:
            failure = str(error)


def _show(event: Event, steps: Steps) -> str:
    """One line a switch; why it failed, if it did."""
    if event.kind not in _SWITCHES:
        return ""
    name = str(event.data.get("what", event.span))
    if event.kind is EventKind.TRANSITION_START:
        steps.waiting(name, "under way")
    elif event.kind is EventKind.TRANSITION_END:
        steps.done(name, describe_phases(event.data))
    else:
        steps.failed(name, f"trying again after: {event.why}")
        return f"{name} failed: {event.why}"
    return ""


def _events(client: PengServe, after: int) -> Iterator[Event]:
    while True:
        try:
            page = client.events(after=after, limit=EVENT_PAGE)
        except PengServeConnectionError:
            return
        yield from page
        if len(page) < EVENT_PAGE:
            return
        after = page[-1].seq


def _newest_event(client: PengServe) -> int:
    newest = 0
    for event in _events(client, 0):
        newest = event.seq
    return newest


def _print_layout(view: LayoutView) -> None:
    output_console().print(
        f"layout {describe_groups(view.layout.groups)}   epoch {view.layout.epoch}   {describe_policy(view.policy)}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
