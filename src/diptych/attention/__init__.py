"""Attention over the paged KV pool, behind one protocol. Device side."""
