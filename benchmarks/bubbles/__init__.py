"""How long stages of real pipelines stand idle, with lookahead and with token counting: `make bench-bubbles`."""
