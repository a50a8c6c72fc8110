"""The tests of every OpenAI route again, now through HAProxy, Serve, Ray and the whole application."""

from tests.cluster.ingress.test_openai_routes import *  # noqa: F403
