"""Decoders and the checkpoints they are read from."""
