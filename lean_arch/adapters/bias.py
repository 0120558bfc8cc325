"""Fine-tuning of biases and norms alone: they need no input of a layer, so the backward pass keeps little.

Ben Zaken et al. 2021, "BitFit" (arXiv 2106.10199).
"""

from torch import nn

from lean_arch.adapters.layers import is_norm
from lean_arch.adapters.method import Method
from lean_arch.adapters.targets import PRESETS, compiled
from lean_arch.adapters.whole import take
from lean_arch.registry import ADAPTERS


@ADAPTERS.register("bias")
class Bias(Method):
    """Trains the biases of the base and, unless `norms` is False, weights and biases of its norms.

    `target` is a regular expression that the whole name of a layer matches; by default it is every layer.
    """

    target = ".*"

    def __init__(self, norms: bool = True):
        super().__init__()
        self.norms = norms

    def attach(self, model, name, target, qkv):
        target = target or self.target
        if target in PRESETS:
            raise ValueError(f"target {target!r} names weights; 'bias' takes a regular expression, as '.*attn.*'")
        paths = [path for path in self.paths(model, target) if path not in self.whole]
        if not paths:
            kinds = "has a bias or is a norm" if self.norms else "has a bias"
            raise ValueError(f"target {target!r} matches no layer that {kinds}")
        take(model, self, paths)

    def paths(self, model: nn.Module, target: str) -> list[str]:
        matches = compiled(target).fullmatch
        found = {}
        for path, module in model.named_modules():
            if not matches(path) or ".adapters." in f".{path}.":
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if name == "bias" or name.endswith("_bias") or (self.norms and is_norm(module)):
                    found.setdefault(parameter, f"{path}.{name}".lstrip("."))
        return list(found.values())

    def detach(self, model, name):
        """Nothing: what was trained is the base's, and `whole` gives it back."""

    def rebuild(self, model, name, saved):
        """Nothing: `whole` holds all."""

    def check_merge(self, model, name, force):
        """Nothing to refuse: what is trained is in the weights already."""

    def facts(self):
        return {"norms": self.norms}
