"""The live page at `/ui`, and the stream of the cluster's state that it draws."""
