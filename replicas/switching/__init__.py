"""How the members of a group change shape together: prepare, meet, move requests, commit.

docs/decisions/0007-switching.md says why in this way.
"""
