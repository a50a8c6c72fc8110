"""What a lane asks of vLLM's scheduler beyond its public calls: which prompts, microbatches and grammars a step has."""
