"""Assembles scheduler, executor and channel into a running engine, in its own process or inside yours."""
