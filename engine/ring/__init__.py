"""The KV ring: its storage, what an eviction frees, how a prompt enters, and what must always hold."""
