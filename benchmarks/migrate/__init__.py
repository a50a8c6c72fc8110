"""What streams notice of a live migration, and how long the drain of an instance takes: `make bench-migrate`."""
