"""KV pages: who owns which, what is cached, and where bytes lie in one.

Everything but `kv.pool` (the tensor) is host-side bookkeeping over page numbers and never imports torch.
"""
