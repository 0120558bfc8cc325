"""Layers with a frozen weight and a small trained update that is sparse."""
