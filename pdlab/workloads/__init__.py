"""Where requests come from: generators, recorded traces, prompts."""
