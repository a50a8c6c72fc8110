"""Lanes that several instances compute together: tensor-parallel ranks and pipeline stages."""
