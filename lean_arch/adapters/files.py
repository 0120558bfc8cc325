"""Adapters on disk: a folder with adapter.json and adapter.safetensors, written whole or not at all.

The JSON says the method, its options, the layers and a hash of the base; nothing in it can run code. Trained values are
joined to one tensor a dtype and indices packed, for headers would outweigh the few numbers of a layer.
"""

import hashlib
import json
import math
import os
import pathlib
import shutil

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from lean_arch.adapters.attach import attach_saved
from lean_arch.adapters.merge import merge, unmerge
from lean_arch.adapters.method import attached, method_of
from lean_arch.adapters.packing import pack_index, unpack_index
from lean_arch.adapters.part import dense

FORMAT = 1
DESCRIPTION, TENSORS = "adapter.json", "adapter.safetensors"


def save(model: nn.Module, name: str, path: str | os.PathLike) -> pathlib.Path:
    """Writes the adapter `name` of `model` to the folder `path`, in the place of one that is there. Returns the folder.

    Raises ValueError for a name that the model does not have, FileExistsError where `path` is something else.
    """
    method, path = method_of(model, name), pathlib.Path(path)
    if path.exists() and not (path / DESCRIPTION).is_file():
        raise FileExistsError(f"path {str(path)!r} exists and holds no adapter; name a new folder")
    joined, layers = {}, {}
    for layer, _, part in method.parts(model, name):
        shapes = {}
        for key, tensor in part.state_dict().items():
            packed = pack_index(tensor) if tensor.dtype == torch.int64 else tensor.detach()
            shapes[key] = [str(packed.dtype).removeprefix("torch."), list(tensor.shape), packed.numel()]
            joined.setdefault(shapes[key][0], []).append(packed.flatten().cpu())
        layers[layer] = {"tensors": shapes, **part.facts()}
    tensors = {kind: torch.cat(parts) for kind, parts in joined.items()}
    trained = method.aside or {whole: model.get_parameter(whole) for whole in method.whole}
    for whole, tensor in trained.items():
        tensors[f"whole.{whole}"] = tensor.detach().cpu()
    for buffer, before in attached(model).buffers.items():
        if not torch.equal(model.get_buffer(buffer).cpu(), before.cpu()):
            tensors[f"buffer.{buffer}"] = model.get_buffer(buffer).cpu()
    description = {
        "format": FORMAT,
        "method": method.registered,
        "name": name,
        "options": method.facts(),
        "base": base_hash(model, leave_out=set(method.whole)),
        "activations": attached(model).activations,
        "layers": layers,
    }
    write_folder(path, description, tensors)
    return path


def write_folder(path: pathlib.Path, description: dict, tensors: dict[str, Tensor]) -> None:
    """The folder is written beside and then renamed, so a crash leaves the old one or the new one."""
    part, old = (path.with_name(f".{path.name}.{word}") for word in ("part", "old"))
    for left in (part, old):
        shutil.rmtree(left, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
        safetensors.torch.save_file(contiguous, part / TENSORS)
        (part / DESCRIPTION).write_text(json.dumps(description, separators=(",", ":")) + "\n")
        for file in (part / TENSORS, part / DESCRIPTION):
            with open(file, "r+b") as opened:
                os.fsync(opened.fileno())
        if path.exists():
            os.replace(path, old)
        os.replace(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def load(model: nn.Module, path: str | os.PathLike, *, name: str | None = None, check_base: bool = True) -> nn.Module:
    """Attaches the adapter that `save` wrote to `path`, under `name` or the one it was saved by. Returns `model`.

    Raises ValueError, and leaves `model` as it was, for a folder that is no adapter or damaged, and for another base
    than it was trained on, unless `check_base` is False.
    """
    description, tensors = read_folder(pathlib.Path(path))
    name = name or description["name"]
    whole = {key.removeprefix("whole."): t for key, t in tensors.items() if key.startswith("whole.")}
    buffers = {key.removeprefix("buffer."): t for key, t in tensors.items() if key.startswith("buffer.")}
    check_fits(model, path, whole, buffers)
    if check_base and base_hash(model, leave_out=set(whole)) != description["base"]:
        raise ValueError(
            f"path {str(path)!r} holds an adapter for another base than this model; load the weights that it was "
            "trained on, or take the risk with check_base=False"
        )
    try:
        attach_saved(model, description, name, split(description, tensors), list(whole))
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"path {str(path)!r} holds an adapter that does not fit this model: {error}") from error
    with torch.no_grad():
        for key, tensor in whole.items():
            model.get_parameter(key).copy_(tensor)
        for key, tensor in buffers.items():
            model.get_buffer(key).copy_(tensor)
    return model


def read_folder(path: pathlib.Path) -> tuple[dict, dict[str, Tensor]]:
    if not (path / DESCRIPTION).is_file():
        raise ValueError(f"path {str(path)!r} holds no adapter; a folder that adapters.save wrote has {DESCRIPTION}")
    try:
        description = json.loads((path / DESCRIPTION).read_text())
        tensors = safetensors.torch.load_file(path / TENSORS)
        if description["format"] != FORMAT:
            raise ValueError(f"format {description['format']}")
        for key in ("method", "name", "options", "base", "layers"):
            description[key]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(f"path {str(path)!r} holds an adapter that cannot be read ({error}); save it again") from error
    return description, tensors


def split(description: dict, tensors: dict[str, Tensor]) -> dict[str, tuple[dict[str, Tensor], dict]]:
    """State and facts of each layer's part."""
    taken, saved = {}, {}
    for layer, facts in description["layers"].items():
        state = {}
        for key, (kind, shape, count) in facts["tensors"].items():
            start = taken.get(kind, 0)
            taken[kind] = start + count
            piece = tensors[kind][start : start + count]
            index = kind == "uint8"
            state[key] = unpack_index(piece, math.prod(shape)).view(shape) if index else piece.view(shape).clone()
        saved[layer] = state, {key: value for key, value in facts.items() if key != "tensors"}
    return saved


def check_fits(model: nn.Module, path, whole: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    parameters, others = dict(model.named_parameters()), dict(model.named_buffers())
    for key, tensor, there in [(k, t, parameters) for k, t in whole.items()] + [
        (k, t, others) for k, t in buffers.items()
    ]:
        if key not in there or there[key].shape != tensor.shape:
            found = f"has it as {tuple(there[key].shape)}" if key in there else "has none"
            raise ValueError(f"path {str(path)!r} brings {key} as {tuple(tensor.shape)}, but this model {found}")


@torch.no_grad()
def base_hash(model: nn.Module, leave_out: set[str]) -> str:
    """Of the parameters of the base, without adapters and what they train whole (those in `leave_out` too)."""
    there = attached(model)
    merged = [name for name, _ in there.merged] if there else []
    if merged:
        unmerge(model, merged[0])  # with it those after it come out and in again
    others = {path: (m, before) for m in (there.methods.values() if there else ()) for path, before in m.whole.items()}
    digest = hashlib.blake2b(digest_size=16)
    for path, parameter in model.named_parameters():
        if ".adapters." in f".{path}" or path in leave_out:
            continue
        tensor = dense(others[path][1] if path in others else parameter.detach())
        digest.update(f"{path} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    if merged:
        merge(model, merged[0], force=True)
    return digest.hexdigest()
