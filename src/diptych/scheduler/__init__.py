"""What runs in each step: waiting queue, page pressure, overlap, and the life of every sequence. Never imports
torch.
"""
