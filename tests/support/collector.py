"""An OpenTelemetry collector that keeps the spans it gets."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """An OTLP collector over HTTP that keeps spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest()
                request.ParseFromString(body)
                for group in request.resource_spans:
                    collector.resources.append({a.key: a.value.string_value for a in group.resource.attributes})
                    collector.spans += [span for scope in group.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()

    def span(self, name: str) -> Any:
        """The one span of that name."""
        (found,) = [span for span in self.spans if span.name == name]
        return found


def attributes(span: Any) -> dict[str, Any]:
    """The attributes of a span, by name."""
    kinds = ("string_value", "int_value", "double_value")
    return {a.key: next((getattr(a.value, k) for k in kinds if a.value.HasField(k)), None) for a in span.attributes}
