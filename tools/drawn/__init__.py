"""Training loops drawn at random, each run on several workers and by plain torch."""
