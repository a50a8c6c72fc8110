"""Lanes over stock vLLM: scheduler, runner and what passes between them. The only folder of this floor with vLLM."""
