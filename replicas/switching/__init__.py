"""How the members of a group change shape together: prepare, meet, move requests, commit (design section 5)."""
