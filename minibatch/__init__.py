"""minibatch: how LLM serving batches requests, as a small engine that people read, run, break and complete."""

__version__ = "0.1.0"
