"""``ringkv plan``: what an engine takes of the memory before a weight is loaded."""
