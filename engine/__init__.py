"""Requests, lanes, the ring, its policies, and the loop that steps them."""
