"""The request channel between ingress and instance: framed TCP, so that a death is an EOF within milliseconds."""
