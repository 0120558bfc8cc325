"""Functions on tensors with their own backward."""
