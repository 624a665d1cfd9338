"""What `tools/fuzz.py` is made of: a mutator that knows structures, and the decoders that it is let at."""
