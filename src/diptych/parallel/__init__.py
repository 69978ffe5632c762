"""Ranks of one engine: which axes they form, and what the ranks of an axis say to each other. Knows no model."""
