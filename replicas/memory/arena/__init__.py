"""One owner of an instance's physical memory, weights and KV: addresses stay, the chunks behind them move."""
