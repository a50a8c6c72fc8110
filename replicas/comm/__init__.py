"""How instances reach each other: peers, communicators and transfers."""
