"""The demo model: a small Llama checkpoint trained on the documentation strings of Python's standard library.

Importing this package costs nothing; torch, transformers and tokenizers are imported by the calls that need them.
"""
