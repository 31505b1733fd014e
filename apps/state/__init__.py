"""``ringkv state``: what the file of a snapshot holds."""
