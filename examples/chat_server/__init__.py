"""A chat server: SmolLM2 in JAX, an OpenAI-compatible endpoint, and kvoffload inside. README.md has the map."""
