"""``ringkv bench``: how fast an engine is, beside the floor of its memory and beside its peers."""
