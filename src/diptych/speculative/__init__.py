"""Speculative decoding: who guesses the next tokens, and how guesses are verified. Device side."""
