"""KV-cache memory as integers: which slots hold which request's tokens. No torch; the executor owns the tensors."""
