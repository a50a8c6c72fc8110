"""KV on device and host in virtual time: production's tables and choices, over a link that takes virtual seconds."""
