"""When to merge instances into tensor-parallel groups and when to split them (Flying Serving section 2.3)."""
