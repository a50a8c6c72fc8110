"""What a request meets first: its key, its id, its size and its shape, before vLLM sees it."""
