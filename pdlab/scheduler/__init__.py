"""Who runs next, and with how many tokens: policies and batching."""
