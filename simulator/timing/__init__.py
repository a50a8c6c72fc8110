"""How long things take: steps, transfers over links, remaps, switches."""
