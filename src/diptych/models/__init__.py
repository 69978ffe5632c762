"""Models: one small file per architecture over shared layers, and where their weights come from."""
