"""Models: configuration, catalogue, loading, tokenizer, and the two families (LLaMA style, GPT-2 style)."""
