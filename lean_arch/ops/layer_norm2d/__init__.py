"""LayerNorm over the channels of maps."""
