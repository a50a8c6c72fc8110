"""Headline figures of the papers, simulated: `make bench-papers`."""
