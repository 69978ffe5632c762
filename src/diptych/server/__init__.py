"""The HTTP face: routes, tokenizing and detokenizing, streaming, and the client that talks to the engine's process."""
