"""Overload of KV memory, without and with dropped parameters, and on static pipelines: `make bench-overload`."""
