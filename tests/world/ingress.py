"""An ingress as a process: the real RouteWatcher, LinkPool, RequestBook and DemandReporter, and its clients."""

import asyncio
from collections.abc import Sequence
from typing import Any

from pengserve.cluster.ingress.config import LimitConfig
from pengserve.cluster.ingress.demand import DemandReporter
from pengserve.cluster.ingress.in_flight.records import RequestBook
from pengserve.cluster.ingress.request.record import RequestRecord, Resumption
from pengserve.cluster.ingress.routing.links import LinkPool
from pengserve.cluster.ingress.routing.routes import RouteWatcher
from pengserve.cluster.ingress.tasks import forever
from pengserve.cluster.ingress.vllm_openai_seam import EngineCoreOutput
from pengserve.planners.types.ids import NO_VERSION, InstanceKey, Version
from pengserve.planners.types.snapshot import RoutingTable
from pengserve.replicas.engine.link import InstanceLink, Moved, Paused, StepBatch, Trial
from tests.support.moving import a_request
from tests.world.answers import Answers, number_of
from tests.world.chaos import InjectedError
from tests.world.cluster import WorldCluster
from tests.world.controllers import Controllers, WorldSource

MAX_MODEL_LEN = 1024


class IngressProcess:
    """One ingress. Stands for `ClusterEngineClient` as the handler of links and of the book's events."""

    def __init__(self, name: str, cluster: WorldCluster, controllers: Controllers, answers: Answers) -> None:
        self.name, self._chaos, self._answers = name, cluster.chaos, answers
        clock = asyncio.get_running_loop().time
        source = WorldSource(controllers, cluster, name)
        self.links = LinkPool(
            self, token="", client_id=name, report_lost=source.report_lost, connect=cluster.connector(name)
        )
        is_only = cluster.num_ingresses == 1
        self.book = RequestBook(self, LimitConfig(), self.links, lambda: MAX_MODEL_LEN, clock, is_only_ingress=is_only)
        self.watcher = RouteWatcher(source, self._on_table)
        self.demand = DemandReporter(self.book, source, name, clock)
        self.seen: dict[int, list[int]] = {}  # by request: its tokens
        self.ends: dict[int, str] = {}  # by request: how it ended for its client
        self.num_records_ended: dict[int, int] = {}
        self._version: Version = NO_VERSION
        jobs = {
            "routes": self.watcher.run, "requests": self.book.run, "sweep": self.links.sweep, "demand": self.demand.run,
        }  # fmt: skip
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(forever(name, job), name=name) for name, job in jobs.items()]

    # Its clients

    def ask(self, number: int) -> None:
        """A client asks; as `ClusterEngineClient.generate`, where an exception is the client's 500."""
        self.seen[number] = []
        try:
            self.book.add(a_request(number, self._answers.length(number)))
        except InjectedError:
            self._ended(number, "failed: InjectedError")
            self._forget(number)

    def leave(self, number: int) -> None:
        """A client goes away."""
        if number in self.seen and number not in self.ends:
            self._ended(number, "left")
            self._forget(number)

    def _forget(self, number: int) -> None:
        try:
            self.book.abort([f"r{number}"])
        except InjectedError:
            return

    async def kill(self) -> None:
        """SIGKILL: the kernel closes its connections, its clients see theirs end."""
        for task in self.tasks:
            task.cancel()
        for number in self.seen:
            if number not in self.ends:
                self._ended(number, "ingress died")
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.links.close()

    # What the parts of the ingress call

    def _on_table(self, table: RoutingTable) -> None:
        if table.version <= self._version:
            self._answers.broken(f"{self.name} takes table {table.version} after {self._version}")
        self._chaos.reach("ingress.on_table")
        self.links.apply(table)
        self.book.wake()
        self._version = table.version

    def on_up(self, link: InstanceLink) -> None:
        self._chaos.reach("ingress.on_up")
        self.book.wake()

    async def on_batch(self, link: InstanceLink, batch: StepBatch) -> None:
        self._chaos.reach("ingress.on_batch")
        self._see(self.book.accept(link, batch.outputs.outputs))

    def on_moved(self, link: InstanceLink, moved: Moved) -> None:
        self._chaos.reach("ingress.on_moved")
        self._see(self.book.move(link, moved))

    def on_trial(self, link: InstanceLink, trial: Trial) -> None:
        self._chaos.reach("ingress.on_trial")
        self.book.note_trial(link, trial)

    def on_paused(self, link: InstanceLink, paused: Paused) -> None:
        self.book.note_pause(link, paused)

    def on_down(self, link: InstanceLink, *, lost: bool) -> None:
        self._chaos.reach("ingress.on_down")
        self.book.lose(link, is_death=lost and link.was_closed_there)

    def is_busy(self, link: InstanceLink) -> bool:
        return self.book.is_busy(link)

    def on_failed(self, request_id: str, error: Exception) -> None:
        self._ended(number_of(request_id), f"failed: {type(error).__name__}")
        self._chaos.reach("events.on_failed")

    def on_ended(self, record: RequestRecord, finish: str) -> None:
        number = number_of(record.request.request_id)
        self.num_records_ended[number] = self.num_records_ended.get(number, 0) + 1
        if self.num_records_ended[number] > 1:
            self._answers.broken(f"the record of request {number} ends twice, now by {finish}")
        self._chaos.reach("events.on_ended")

    def on_finished(self, output: EngineCoreOutput) -> None:
        self._see([output])

    def on_dispatched(self, key: InstanceKey, resumed: Resumption | None) -> None:
        self._chaos.reach("events.on_dispatched")

    def on_resumed(self, gap_s: float) -> None:
        self._chaos.reach("events.on_resumed")

    def on_request_moved(self, *, carried: bool) -> None:
        self._chaos.reach("events.on_request_moved")

    def on_switched(self, gap_s: float) -> None:
        return

    # Streams

    def _see(self, outputs: Sequence[EngineCoreOutput]) -> None:
        for output in outputs:
            number = number_of(output.request_id)
            if number in self.ends:
                self._answers.broken(f"request {number} gets tokens after its end ({self.ends[number]})")
                return
            self.seen[number] += output.new_token_ids
            self._answers.check(number, self.seen[number], f"the stream of {self.name}")
            if output.finish_reason is not None:
                if len(self.seen[number]) != self._answers.length(number):
                    self._answers.broken(f"the answer of request {number} ends after {len(self.seen[number])} tokens")
                self._ended(number, str(output.finish_reason))

    def _ended(self, number: int, how: str) -> None:
        if number in self.ends:
            self._answers.broken(f"request {number} ends by {how} after {self.ends[number]}")
        self.ends[number] = how

    def memory(self) -> dict[str, Any]:
        """What must be empty when no request is left."""
        book = self.book
        held = {
            "records": book._records, "copies": book._copies.records, "urgent": book._placing.urgent,
            "waiting": book._waiting,
            "trials": book._trials._on_trial, "closing links": self.links._closing, "reports": self.links._reports,
        }  # fmt: skip
        return {name: value for name, value in held.items() if value}
