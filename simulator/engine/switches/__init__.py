"""What a change of shape does with requests, KV and weights, in virtual time: one file for each kind."""
