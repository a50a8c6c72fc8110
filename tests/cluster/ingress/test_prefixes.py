"""What an ingress knows of prefix caches, and where requests go by it."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pengserve.cluster import app
from pengserve.cluster.ingress.config import LimitConfig
from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.cluster.ingress.request.request_options import NO_OPTIONS, RequestOptions
from pengserve.cluster.ingress.routing.dispatcher import STEPS_UNTIL_SEEN
from pengserve.cluster.ingress.routing.prefixes import GRANULE, MAX_GRANULES, MAX_SESSIONS, Prefixes, chain_of
from pengserve.cluster.settings_sources import load_settings
from pengserve.planners.types.contract import Contract
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.snapshot import InstanceStats
from tests.support.moving import Cluster, FakeLink, a_request

KEYS = [InstanceKey(instance_id=InstanceId(i), incarnation=0) for i in range(3)]
ROOM, KEY = 1 << 20, b"a secret"  # tokens; of the hashes
LONG = [7 * i % 1000 for i in range(10 * GRANULE)]
tokens = st.lists(st.integers(0, 3), max_size=3 * GRANULE)


def record(prompt: list[int], options: RequestOptions = NO_OPTIONS, **fields: Any) -> RequestRecord:
    """A request with this prompt."""
    request = a_request(0, 5)
    request.prompt_token_ids = prompt
    for name, value in fields.items():
        setattr(request, name, value)
    return RequestRecord(request, options)


@given(tokens, tokens)
def test_chains_share_as_many_hashes_as_the_tokens_share_granules(one: list[int], other: list[int]) -> None:
    first, second = chain_of(one, None, KEY), chain_of(other, None, KEY)
    assert len(first) == len(one) // GRANULE
    for i in range(min(len(first), len(second))):
        stop = GRANULE * (i + 1)
        assert (first[i] == second[i]) == (one[:stop] == other[:stop])


def test_another_salt_is_another_chain_and_long_prompts_are_cut() -> None:
    chains = [chain_of(LONG, salt, KEY) for salt in (None, "a", "b")]
    assert not set(chains[0]) & set(chains[1]) and not set(chains[1]) & set(chains[2])
    assert len(chain_of([1] * (GRANULE * (MAX_GRANULES + 5)), None, KEY)) == MAX_GRANULES


def test_it_finds_what_was_sent_and_what_was_answered() -> None:
    prefixes, first = Prefixes(1000), record(LONG[: 2 * GRANULE])
    prefixes.sent(first, KEYS[0], ROOM)
    assert prefixes.hits(record(LONG)) == {KEYS[0]: 2 * GRANULE}
    first.output_token_ids += LONG[2 * GRANULE : 4 * GRANULE]
    prefixes.ended(first, KEYS[0], ROOM)
    assert prefixes.hits(record(LONG)) == {KEYS[0]: 4 * GRANULE}
    assert prefixes.hits(record(LONG, cache_salt="another")) == {}
    assert prefixes.hits(record(LONG, mm_features=["an image"])) == {}


def test_a_new_shape_or_life_holds_nothing() -> None:
    prefixes = Prefixes(1000)
    for key in KEYS[:2]:
        prefixes.follow(key, "dp")
        prefixes.sent(record(LONG), key, ROOM)
    prefixes.follow(KEYS[0], "tp2")
    prefixes.forget(KEYS[1])
    assert prefixes.hits(record(LONG)) == {}


def test_sessions_belong_to_their_key_and_are_bounded() -> None:
    prefixes = Prefixes(1000)
    mine, theirs = (RequestOptions(contract=Contract(session="s"), key_id=key_id) for key_id in ("a", "b"))
    prefixes.sent(record([1] * 100, mine), KEYS[1], ROOM)
    assert prefixes.expected(record([2] * 100, mine), KEYS) == {KEYS[1]: 50}
    assert prefixes.expected(record([2] * 100, theirs), KEYS) == {}
    for number in range(MAX_SESSIONS):
        prefixes.sent(record([1], replace(mine, contract=Contract(session=f"{number}"))), KEYS[0], ROOM)
    assert prefixes.expected(record([2] * 100, mine), KEYS) == {}


def test_nothing_is_remembered_where_that_is_off() -> None:
    prefixes = Prefixes(0)
    prefixes.sent(record(LONG, RequestOptions(contract=Contract(session="s"))), KEYS[0], ROOM)
    assert prefixes.expected(record(LONG, RequestOptions(contract=Contract(session="s"))), KEYS) == {}


def test_ingresses_agree_on_a_home_for_what_none_of_them_knows() -> None:
    ingresses = [Prefixes(1000, "the cluster's", is_only_ingress=False) for _ in range(2)]
    long, in_session = record(LONG), record([1] * 100, RequestOptions(contract=Contract(session="s")))
    for asked in (long, in_session):
        first, second = (ingress.expected(asked, KEYS) for ingress in ingresses)
        assert first == second and first
    strangers = Prefixes(1000, "another cluster's", is_only_ingress=False)
    homes = [[who.expected(record([n] * 640), KEYS) for n in range(20)] for who in (*ingresses, strangers)]
    assert homes[0] == homes[1] != homes[2]
    ingresses[0].sent(long, KEYS[2], ROOM)
    assert ingresses[0].expected(long, KEYS) == {KEYS[2]: len(LONG)}


def three() -> tuple[Cluster, list[FakeLink]]:
    """Idle instances with room for many long prompts."""
    cluster = Cluster(3, limits=LimitConfig())
    stats = InstanceStats(block_size=32, kv_blocks_total=1 << 14, max_model_len=1 << 14)
    cluster.max_model_len = 1 << 14
    return cluster, [cluster.connect(instance, stats) for instance in cluster.instances]


def sent_to(cluster: Cluster, prompt: list[int], number: int, options: RequestOptions = NO_OPTIONS) -> InstanceKey:
    """Where a request goes. Its answer never comes, so that it stays there as load."""
    request = a_request(number, 5)
    request.prompt_token_ids = prompt
    cluster.lengths[number], cluster.seen[number] = 5, []
    cluster.book.add(request, options)
    key = cluster.log[-1][1]
    assert isinstance(key, InstanceKey)
    return key


def computed(links: list[FakeLink]) -> None:
    """What was sent so far shows in the stats, and has left no queue."""
    for link in links:
        link.stats = replace(link.stats, step=link.stats.step + STEPS_UNTIL_SEEN)


def test_a_prompt_goes_where_its_prefix_is_and_elsewhere_when_the_queue_there_is_longer() -> None:
    cluster, links = three()
    first = sent_to(cluster, LONG, 0)
    computed(links)
    follow_ups = [sent_to(cluster, [*LONG, *([number] * 100)], number) for number in range(1, 4)]
    assert set(follow_ups) == {first}
    others = [sent_to(cluster, [number] * len(LONG), number) for number in range(10, 12)]
    assert set(others) == set(KEYS) - {first}
    crowd = [sent_to(cluster, [*LONG, *([number] * 1000)], number) for number in range(20, 40)]
    assert set(crowd) == set(KEYS)


def test_small_hits_do_not_gather_load() -> None:
    cluster, _ = three()
    system = LONG[:GRANULE]
    places = [sent_to(cluster, [*system, *([number] * 4 * GRANULE)], number) for number in range(60)]
    assert min(places.count(key) for key in KEYS) >= 18


def test_a_session_stays_where_it_was() -> None:
    cluster, links = three()
    short = RequestOptions(contract=Contract(session="s"))
    first = sent_to(cluster, [1] * 200, 0, short)
    assert sent_to(cluster, [2] * 200, 1) != first
    computed(links)
    assert sent_to(cluster, [3] * 400, 2, short) == first


def test_the_setting_reaches_the_ingress_unless_instances_cache_no_prefixes() -> None:
    for engine, expected in (({}, 7), ({"enable_prefix_caching": False}, 0)):
        settings = load_settings(None, model="m", limits={"max_prefix_entries": 7}, engine=engine)
        assert app.ingress_config(settings, app.instance_config(settings)).limits.max_prefix_entries == expected
