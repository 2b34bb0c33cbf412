"""Averages of models instead of gradients, under the paths that torch has."""
