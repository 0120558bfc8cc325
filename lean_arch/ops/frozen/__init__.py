"""Layers whose own weights are frozen, keeping for the backward pass what the gradient of their input needs alone.

PyTorch keeps what the weight's gradient would need, whether or not anybody wants it (Bhatia and Dangel, "Lowering
PyTorch's Memory Consumption for Selective Differentiation", 2024, arXiv 2404.12406).
"""
