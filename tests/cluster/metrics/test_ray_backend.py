"""Through a real Ray: what a worker records comes out of its node's metric agent under the documented names."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

_PROGRAM = """
import sys, time, urllib.request
import ray

ray.init(
    address="local",
    num_cpus=1,
    include_dashboard=False,
    log_to_driver=False,
    _system_config={"metrics_report_interval_ms": 500},
)

@ray.remote
class Worker:
    def record(self):
        from pengserve.cluster.metrics import catalog
        from pengserve.cluster.metrics.facade import Metrics, resolve_backend
        assert resolve_backend("auto") == "prometheus", "one node, one ingress"
        assert resolve_backend("auto", num_ingresses=2) == "ray"
        metrics = Metrics("ray", app="shop")
        metrics.counter(catalog.DISPATCHED, instance_id="1").inc(3)
        metrics.gauge(catalog.ROUTES).set(2)
        metrics.histogram(catalog.RESUME_SECONDS).observe(0.02)
        body, content_type = metrics.exposition()
        assert b"pengserve_" not in body and content_type.startswith("text/plain")

worker = Worker.remote()
ray.get(worker.record.remote(), timeout=60)
url = f"http://{ray.nodes()[0]['NodeManagerAddress']}:{ray.nodes()[0]['MetricsExportPort']}/metrics"
wanted = ("ray_pengserve_dispatch_total{", "ray_pengserve_routes{", "ray_pengserve_resume_seconds_bucket{")
give_up = time.monotonic() + 60
lines = []
while time.monotonic() < give_up:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            lines = [line for line in answer.read().decode().splitlines() if "ray_pengserve_" in line]
    except OSError:
        pass  # the agent is not listening yet
    if all(any(line.startswith(name) for line in lines) for name in wanted):
        break
    time.sleep(0.2)
dispatched = [line for line in lines if line.startswith("ray_pengserve_dispatch_total{")]
assert len(dispatched) == 1 and dispatched[0].endswith(" 3.0"), lines
assert 'app="shop"' in dispatched[0] and 'instance_id="1"' in dispatched[0], dispatched
ray.shutdown()
print("exported")
"""


def test_a_worker_exports_through_rays_agent() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exported" in done.stdout
