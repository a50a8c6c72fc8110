"""What came of a run: figures, plots, one JSON, one HTML page."""
