"""The hinge: how one engine's KV pages, and the first token with them, reach another.

`state`, `plan`, `wire`, `extension`, `control`, `rooms`, `destination`, `staging`, `landing` and `handoff` are pure:
data and arithmetic, no sockets, no clocks, no tensors, no NIXL. So the protocol can be simulated, and its frames pinned
byte by byte. Never imports torch.
"""
