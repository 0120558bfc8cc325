"""The depthwise convolution: each channel with a filter of its own."""
