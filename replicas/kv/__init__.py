"""Where KV is, who has it, and how its bytes move: one address, one ledger, one mover. Needs torch alone."""
