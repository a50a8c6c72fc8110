"""Measurements, run from the root of the repository. Not part of the package."""
