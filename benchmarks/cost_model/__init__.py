"""What the cost model of steps is worth here, and lookahead batches with it: `make bench-cost-model`."""
