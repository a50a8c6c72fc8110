"""Requests that an ingress keeps: where they run, and what becomes of them when an instance dies."""
