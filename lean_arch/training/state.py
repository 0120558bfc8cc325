"""What a run leaves on disk, each file whole or not there at all, and the checkpoints a run resumes from.

checkpoints/step_000012/ holds model.safetensors, optimizer.safetensors and state.json (position, scaler, random
states, configuration). Tensors are safetensors, the rest is JSON: nothing here can run code when it is read.
"""

import contextlib
import json
import os
import pathlib
import random
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.optim import Optimizer

from lean_arch.training.adapter import changing_state
from lean_arch.training.config import InputError

KEPT = 2  # checkpoints


class Damaged(InputError):
    """A checkpoint that cannot be read."""


@contextlib.contextmanager
def whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a file to write that then becomes `path`: a crash leaves the old file or the new one, never a part."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        with open(part, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: pathlib.Path, content: bytes | str) -> None:
    with whole(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: pathlib.Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


def read_json(path: pathlib.Path) -> Any:
    return json.loads(path.read_text())


def write_tensors(path: pathlib.Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes tensors as safetensors. Names that share a tensor (tied weights) each get their own copy in the file."""
    seen, apart = set(), {}
    for name, tensor in tensors.items():
        tensor, address = tensor.detach().contiguous(), tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    with whole(path) as part:
        safetensors.torch.save_file(apart, part, metadata)


def taken_folders(base: pathlib.Path, mark: str) -> list[pathlib.Path]:
    """Of `base`, `base`-2, `base`-3 and so on, those that hold a file called `mark`, in that order."""
    numbers = (folder.name.removeprefix(f"{base.name}-") for folder in base.parent.glob(f"{base.name}-*"))
    folders = [base, *(base.with_name(f"{base.name}-{n}") for n in sorted(int(n) for n in numbers if n.isdigit()))]
    return [folder for folder in folders if (folder / mark).exists()]


def free_folder(output: str | None, default: pathlib.Path, mark: str) -> pathlib.Path:
    """Where a new run may write: `output`, or else `default`, numbered if it is taken.

    Raises InputError when `output` holds a run already (a file called `mark`), or is a file.
    """
    if output is None:
        taken = taken_folders(default, mark)
        last = taken[-1].name.removeprefix(default.name).lstrip("-") if taken else "0"
        return default.with_name(f"{default.name}-{int(last or 1) + 1}") if taken else default
    folder = named_folder(output)
    if (folder / mark).exists():
        raise InputError(f"output {output!r} already holds a run; --resume goes on with it, or name another folder")
    return folder


def named_folder(output: str) -> pathlib.Path:
    """Raises InputError when `output` is a file, or inside one."""
    folder = pathlib.Path(output)
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise InputError(f"output {output!r} cannot be a folder, for {there} is a file; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"output {output!r} cannot be written, for {there} is read-only; name another")
    return folder


class Metrics:
    """metrics.csv: one row a step, whole lines only. Opening it after step `done` drops the rows of later steps."""

    COLUMNS = ("step", "loss", "lr", "samples_per_s", "peak_bytes", "micro_batch_size")

    def __init__(self, path: pathlib.Path, done: int, writes: bool = True):
        self.path, self.done, self.writes = path, done, writes

    def __enter__(self):
        if self.writes:
            rows = self._rows_before() if self.done else []
            write_whole(self.path, "\n".join([",".join(self.COLUMNS), *rows]) + "\n")
            self.file = open(self.path, "a", buffering=1)  # a line at a time
        return self

    def __exit__(self, *exception):
        if self.writes:
            self.file.close()

    def _rows_before(self) -> list[str]:
        try:
            rows = self.path.read_text().splitlines()[1 : self.done + 1]
        except (OSError, ValueError):
            rows = []
        if len(rows) < self.done or any(not row.startswith(f"{n},") for n, row in enumerate(rows, start=1)):
            raise InputError(f"resume needs the first {self.done} rows of {self.path}; put that file back")
        return rows

    def add(self, *row: float) -> None:
        if self.writes:
            self.file.write(",".join(map(repr, row)) + "\n")


def checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """The complete checkpoints of the run in `folder`, oldest first."""
    return sorted((folder / "checkpoints").glob("step_[0-9]*"))


def save_checkpoint(
    folder: pathlib.Path, step: int, model: nn.Module, optimizer: Optimizer, accelerator: Accelerator, facts: dict
) -> None:
    """Writes checkpoints/step_<step> with `facts` (anything JSON takes) beside the states, and drops all but two.

    Every process calls it; the main one writes.
    """
    randoms = gather_object([random_states()])
    if accelerator.is_main_process:
        final = folder / "checkpoints" / f"step_{step:06d}"
        part = final.with_name(f".{final.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write_tensors(part / "model.safetensors", changing_state(model))
        tensors, rest = split_optimizer(optimizer)
        devices = {name: tensor.device.type for name, tensor in tensors.items()}
        write_tensors(part / "optimizer.safetensors", tensors, devices)
        scaler = accelerator.scaler.state_dict() if accelerator.scaler else None
        state = {"step": step, "optimizer": rest, "scaler": scaler, "random": randoms, **facts}
        write_json(part / "state.json", state)
        shutil.rmtree(final, ignore_errors=True)  # one of the same step, from before a resume
        os.replace(part, final)
        for old in checkpoints(folder)[:-KEPT]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def read_facts(checkpoint: pathlib.Path) -> dict:
    """What `save_checkpoint` put into state.json. Raises Damaged when it cannot be read."""
    with refusing_damage(checkpoint):
        return read_json(checkpoint / "state.json")


@contextlib.contextmanager
def refusing_damage(checkpoint: pathlib.Path) -> Iterator[None]:
    """Within, whatever a file of `checkpoint` fails with ends in a Damaged that names the folder."""
    try:
        yield
    except (OSError, ValueError, KeyError, IndexError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
        raise Damaged(f"resume cannot read {checkpoint}, which is damaged or of another model") from error


def load_checkpoint(
    checkpoint: pathlib.Path, state: dict, model: nn.Module, optimizer: Optimizer, accelerator: Accelerator
) -> None:
    """Puts everything back as it was when `checkpoint` was written, in place. `state` is its `read_facts`.

    Raises Damaged when a file is, or is not of this run's model.
    """
    with refusing_damage(checkpoint):
        weights = safetensors.torch.load_file(checkpoint / "model.safetensors")
        with safetensors.safe_open(checkpoint / "optimizer.safetensors", "pt") as file:
            devices = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        own = changing_state(model)
        if weights.keys() != own.keys():
            raise KeyError(*sorted(weights.keys() ^ own.keys()))
        model.load_state_dict(weights, strict=False)  # frozen weights are not in it
        join_optimizer(optimizer, tensors, devices, state["optimizer"])
        if accelerator.scaler:
            accelerator.scaler.load_state_dict(state["scaler"])
        set_random_states(state["random"][accelerator.process_index])


def split_optimizer(optimizer: Optimizer) -> tuple[dict[str, torch.Tensor], dict]:
    """(state tensors by "parameter number.name" and "group.number.name", all else, which JSON can hold)."""
    tensors, others = {}, {}
    for number, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{number}.{name}"] = value
            else:
                others[f"{number}.{name}"] = value
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        tensors |= {f"group.{number}.{k}": v for k, v in group.items() if isinstance(v, torch.Tensor)}
        # a dtype is a choice of the optimizer's constructor, which the resumed run calls again
        told = {k: v for k, v in group.items() if k != "params" and not isinstance(v, torch.Tensor | torch.dtype)}
        groups.append(told)
    return tensors, {"others": others, "groups": groups}


def join_optimizer(optimizer: Optimizer, tensors: dict, devices: dict[str, str], rest: dict) -> None:
    """The inverse of `split_optimizer`, into a fresh optimizer. The state keeps its dtypes to the bit."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, value in (tensors | rest["others"]).items():
        if key.startswith("group."):  # a counter that LAMB keeps for all its parameters
            _, number, name = key.split(".")
            optimizer.param_groups[int(number)][name] = value
            continue
        number, _, name = key.partition(".")
        parameter = parameters[int(number)]
        if key in tensors and devices[key] != "cpu":  # some state, as Adam's step, lives on the CPU beside a GPU
            value = value.to(parameter.device)
        optimizer.state[parameter][name] = value
    for group, saved in zip(optimizer.param_groups, rest["groups"], strict=True):
        for name, value in saved.items():
            group[name] = tuple(value) if isinstance(group.get(name), tuple) else value


def random_states() -> dict:
    """Python's, NumPy's, PyTorch's and every GPU's generator of this process, as JSON can hold them."""
    numpy = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [numpy[0], numpy[1].tolist(), *numpy[2:]],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.numpy().tobytes().hex() for state in torch.cuda.get_rng_state_all()],
    }


def set_random_states(states: dict) -> None:
    def tensor(text):
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(tensor(states["torch"]))
    torch.cuda.set_rng_state_all([tensor(text) for text in states["cuda"]])
