"""Requests to replay: loaders of public formats, generators, windows, scaling, statistics."""
