"""Makes `simulator/hardware/coefficients.csv` of measured kernel tables: `python -m benchmarks.step_tables DIR`."""
