"""Names in Ray's cluster that more than one floor knows."""

NAMESPACE = "pengserve"  # of actors, and of keys in the key-value store


def fingerprint_name(app: str) -> str:
    """Key of the fingerprint that the application's instances have now; the end of an actor's name is its own."""
    return f"pengserve:{app}:fingerprint"
