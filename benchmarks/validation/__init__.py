"""How near simulations come to what was measured: `python -m benchmarks.validation`."""
