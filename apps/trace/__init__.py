"""``ringkv trace``: what the ring remembered of a request, as a file, a page and a picture."""
