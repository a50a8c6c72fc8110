"""A public workload for fairness and context switches: sessions, a flood, priorities that change; and a scorer."""
