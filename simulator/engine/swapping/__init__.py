"""Context switches: requests whose priorities change while they run, and KV that goes to the host and comes back."""
