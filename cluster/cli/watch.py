"""`pengserve status`, `top` and `events`: they read the running application over HTTP and change nothing."""

import json
import time

from rich.live import Live

from pengserve.client import PengServe, PengServeConnectionError
from pengserve.cluster.cli.output import output_console, print_value
from pengserve.cluster.cli.shape_views import outcome_table, why_table
from pengserve.cluster.cli.views import event_line, status_view, tenants_view, top_view
from pengserve.planners.types.codec import to_data
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.snapshot import ClusterSnapshot

EVENT_PAGE = 500
FOLLOW_PERIOD_S = 1.0


def run_status(url: str, admin_key: str | None, as_json: bool) -> None:
    """Print the snapshot once."""
    with PengServe(url, admin_key=admin_key) as client:
        snapshot = client.status()
    print_value(snapshot, status_view, as_json)


def run_top(url: str, admin_key: str | None, interval_s: float, once: bool) -> None:
    """Redraw until Ctrl-C; with `once`, print one frame over an interval of `interval_s`."""
    console = output_console()
    with PengServe(url, admin_key=admin_key) as client:
        before, now = None, client.status()
        if once:
            time.sleep(interval_s)
            console.print(top_view(now, client.status()))
            return
        try:
            with Live(top_view(before, now), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(interval_s)
                    before, now, note = _next_frame(client, before, now)
                    live.update(top_view(before, now, note), refresh=True)
        except KeyboardInterrupt:
            return


def run_top_tenants(url: str, admin_key: str | None, interval_s: float, once: bool) -> None:
    """The same by tenant and class, as the ingress that answers sees them."""
    console = output_console()
    with PengServe(url, admin_key=admin_key) as client:
        if once:
            console.print(tenants_view(client.tenants()))
            return
        try:
            with Live(tenants_view(client.tenants()), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(interval_s)
                    live.update(tenants_view(client.tenants()), refresh=True)
        except KeyboardInterrupt:
            return


def run_events(url: str, admin_key: str | None, after: int, follow: bool, as_json: bool, is_why: bool = False) -> None:
    """Print events after number `after`, all there are, and with `follow` those to come.

    With `is_why` decisions about the layout alone, each with all options and what was predicted, and their outcomes.
    """
    console = output_console()
    with PengServe(url, admin_key=admin_key) as client:
        try:
            while True:
                page = client.events(after=after, limit=EVENT_PAGE)
                for event in page:
                    after = event.seq
                    if is_why and event.kind not in (EventKind.PLAN_DECIDED, EventKind.PLAN_OUTCOME):
                        continue
                    if as_json:
                        print(json.dumps(to_data(event)), flush=True)
                        continue
                    console.print(event_line(event), soft_wrap=True)
                    if is_why:
                        is_outcome = event.kind is EventKind.PLAN_OUTCOME
                        console.print((outcome_table if is_outcome else why_table)(event.data))
                if len(page) == EVENT_PAGE:
                    continue
                if not follow:
                    return
                time.sleep(FOLLOW_PERIOD_S)
        except KeyboardInterrupt:
            return


def _next_frame(
    client: PengServe, before: ClusterSnapshot | None, now: ClusterSnapshot
) -> tuple[ClusterSnapshot | None, ClusterSnapshot, str]:
    # The view outlives a restart of what it watches. Rates span two different snapshots, so one that did not change
    # (the controller ticks at its own pace) keeps its predecessor.
    try:
        newest = client.status()
    except PengServeConnectionError as error:
        return before, now, str(error)
    return (now, newest, "") if newest.time_s > now.time_s else (before, newest, "")
