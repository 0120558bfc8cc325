"""The floors of the house: a package imports only from the floors below its own."""

import ast
import pathlib

import lean_arch

ROOT = pathlib.Path(lean_arch.__file__).parent
MAY_IMPORT = {  # package -> packages of lean_arch it may import, besides itself
    "ops": set(),
    "blocks": {"ops", "registry"},
    "memory": {"ops"},
    "adapters": {"ops", "blocks", "memory", "registry"},
    "models": {"ops", "blocks", "adapters", "memory", "registry"},
    "training": {"ops", "blocks", "adapters", "memory", "models", "registry"},
}
NO_TIMM = {"ops", "blocks", "memory", "adapters"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module == "lean_arch":
                yield from (f"lean_arch.{alias.name}" for alias in node.names)


def test_each_package_imports_only_from_the_floors_below():
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} <= set(MAY_IMPORT)
    seen = 0
    for package, allowed in MAY_IMPORT.items():
        for path in (ROOT / package).rglob("*.py"):
            for name in imports(path):
                parts = name.split(".")
                if parts[0] == "timm":
                    assert package not in NO_TIMM, f"{path} imports timm"
                if parts[0] == "lean_arch":
                    seen += 1
                    # the bare package (create_model) sits on the models floor
                    floor = parts[1] if len(parts) > 1 else "models"
                    assert floor == package or floor in allowed, f"{path} imports {name}, above or beside its floor"
    assert seen > 5
