"""API keys: what they may do, where they are kept, what they have used, and who changed them."""
