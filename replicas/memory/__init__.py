"""What memory an instance has and which lane uses it: block ledger, weight views, KV views."""
