"""``ringkv generate --input``: files of prompts, which resume where they stopped."""
