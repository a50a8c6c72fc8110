"""What memory an instance has and who uses it: block ledger, weight views, KV views."""
