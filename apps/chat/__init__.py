"""``ringkv chat``: a conversation, its commands, its file, and its terminal."""
