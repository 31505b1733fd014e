"""How the next token is drawn: the effective values, the lanes' state on the device, forced tokens."""
