"""Pure data shared by the host and the device side, and typed ZMQ channels. Never imports torch."""
