"""What merges and splits cost, and what running streams notice of them: `make bench-switch`."""
