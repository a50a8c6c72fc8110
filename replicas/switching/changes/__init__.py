"""The changes of a layout, one class for each: what every member does with requests, KV, memory and weights."""
