"""What people run, each in a folder of its own: it uses the engine's public objects and none of its insides."""
