"""The router: which engines there are, which of them takes a request, and the way of its bytes. Never imports torch."""
