"""lean_arch: PyTorch architectures that train in a fraction of the memory.

Importing it registers the vision architectures with timm, so `timm.create_model("lean_vit_small")` works too.
"""

from lean_arch.models import create_model, list_models

__all__ = ["create_model", "list_models"]
__version__ = "0.1.0"
