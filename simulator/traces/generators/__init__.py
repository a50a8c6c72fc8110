"""Traces that are drawn: arrivals and lengths from a seed. Arrivals never depend on the lengths drawn beside them."""
