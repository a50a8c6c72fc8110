"""How much PengServe loses, or gains, against the best static layout: `make bench-regret`."""
