"""KV on the device and on the host: what is where, requests that are parked and come back, prefixes that are kept."""
