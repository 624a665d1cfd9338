"""The topology of a parameter server: a worker pushes to its shards, and fetches from them."""
