"""The question of an orphaned instance, to a real Ray: is my application still there, with instances like me?"""

from collections.abc import Iterator

import pytest

pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Asker:
    """As an instance: a process of its own that lives on when another one shuts Serve down."""

    def ask(self, app: str, fingerprint: str) -> bool | None:
        from pengserve.replicas.actor import application_exists

        return application_exists(app, fingerprint)


@pytest.fixture
def cluster() -> Iterator[None]:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def test_an_application_that_is_gone_is_known_to_be_gone(cluster: None) -> None:
    """After a shutdown of Serve every later question failed, and an instance that had asked before stayed for ever."""
    import ray
    from ray import serve
    from ray.experimental.internal_kv import _internal_kv_put

    from pengserve.planners.types.names import NAMESPACE, fingerprint_name

    asker = ray.remote(Asker).remote()

    def application_exists(app: str, fingerprint: str) -> bool | None:
        answer: bool | None = ray.get(asker.ask.remote(app, fingerprint), timeout=120)
        return answer

    assert application_exists("app", "f1") is False, "no Serve at all"

    @serve.deployment(num_replicas=1)
    def answer() -> str:
        return "here"

    serve.start(proxy_location="Disabled")
    serve.run(answer.bind(), name="app", route_prefix=None)  # type: ignore[attr-defined]
    assert application_exists("app", "f1") is True
    assert application_exists("another", "f1") is False
    _internal_kv_put(fingerprint_name("app"), b"f1", overwrite=True, namespace=NAMESPACE)
    assert application_exists("app", "f1") is True
    _internal_kv_put(fingerprint_name("app"), b"f2", overwrite=True, namespace=NAMESPACE)
    assert application_exists("app", "f1") is False, "the application has other instances now"
    serve.shutdown()
    assert application_exists("app", "f2") is False
