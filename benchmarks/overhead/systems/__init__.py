"""The systems that are compared. Each starts its servers, gives their addresses, and stops what it started."""
