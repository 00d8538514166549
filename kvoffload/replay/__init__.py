"""`kvoffload replay`: a trace or synthetic traffic through the cache, with bytes (verified.py) or without (hits.py)."""
