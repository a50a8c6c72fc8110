"""Units and the arithmetic between them. Times are seconds (`_s`), sizes bytes (`_bytes`), lengths tokens."""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Number of KV blocks that hold `num_tokens`, for blocks of `block_size` tokens."""
    return -(-num_tokens // block_size)


def format_bytes(num_bytes: float) -> str:
    """`1536 -> '1.5 KiB'`. Binary units, one decimal."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
