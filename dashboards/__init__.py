"""Grafana dashboards and Prometheus alerts, built from values and shipped as files."""

BACKENDS = {"prometheus": "pengserve.json", "ray": "pengserve-ray.json"}
"""Metrics backend and its file."""
