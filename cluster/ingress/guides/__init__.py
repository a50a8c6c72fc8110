"""Schemas, patterns and grammars of requests: what they would cost, and a process that compiles them within limits."""
