"""Keras models: how their training step is replaced, and steps without a model."""
