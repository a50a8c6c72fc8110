"""How many answers have ended at a scheduler, and how long they were."""

from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.vllm_seam import Request, RequestStatus, SamplingParams
from tests.support.vllm_schedulers import capacity_of, give_tokens, scheduler_handle


def handle() -> SchedulerHandle:
    return scheduler_handle(capacity_of(16), max_num_batched_tokens=64)


def request(name: str, num_tokens: int) -> Request:
    return Request(name, [1] * 8, SamplingParams(max_tokens=num_tokens, ignore_eos=True), None)


def serve(scheduler: SchedulerHandle) -> None:
    while scheduler.has_unfinished:
        give_tokens(scheduler, scheduler.schedule())


def test_answers_count_when_they_end_and_are_told_once() -> None:
    scheduler = handle()
    for name, num_tokens in (("a", 3), ("b", 5)):
        scheduler.add(request(name, num_tokens))
    give_tokens(scheduler, scheduler.schedule())
    assert scheduler.ended.take() == (0, 0)
    serve(scheduler)
    assert scheduler.ended.take() == (2, 8)
    assert scheduler.ended.take() == (0, 0)


def test_an_answer_that_began_elsewhere_counts_whole() -> None:
    scheduler, moved = handle(), request("moved", 10)
    moved.append_output_token_ids([7] * 9)
    moved.status = RequestStatus.PREEMPTED
    scheduler.add(moved, first=True)
    serve(scheduler)
    assert scheduler.ended.take() == (1, 10)


def test_what_is_aborted_or_goes_on_elsewhere_has_not_ended() -> None:
    scheduler = handle()
    scheduler.add(request("a", 3))
    give_tokens(scheduler, scheduler.schedule())
    scheduler.end(["a"])
    assert scheduler.ended.take() == (0, 0)
