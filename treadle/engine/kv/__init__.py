"""KV blocks: the pool that counts their users and the prefix cache that finds them by content."""
