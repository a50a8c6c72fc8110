"""Tenants at an ingress: the order of their requests, their limits, and what they were served."""
