"""The projection to a vocabulary and its cross-entropy in one, without the logits."""
