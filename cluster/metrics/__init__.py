"""Metrics: a catalog, one facade over Prometheus and Ray, and what keeps the cluster's values up to date."""
