"""Measuring, planning and saving memory, for any nn.Module."""
