"""The registry: names in, things out, and a sentence for a name that is not there."""

import pytest

from lean_arch.registry import Registry


def filled():
    registry = Registry("adapter")
    for name in ("sparse", "lora", "ladder"):
        registry.register(name)(object())
    return registry


def test_what_is_registered_is_found():
    registry = filled()

    @registry.register("bias")
    class Bias:
        pass

    assert registry.get("bias") is Bias
    assert "bias" in registry
    assert "bios" not in registry
    assert registry.names() == ["bias", "ladder", "lora", "sparse"]
    assert registry.names("l*") == ["ladder", "lora"]


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match=r"^adapter 'spares' does not exist; nearest: sparse$"):
        filled().get("spares")
    with pytest.raises(ValueError, match=r"^adapter '%%' does not exist; there are ladder, lora, sparse$"):
        filled().get("%%")
    with pytest.raises(ValueError, match="there are none"):
        Registry("adapter").get("x")


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="adapter 'lora' is registered already"):
        filled().register("lora")(object())
