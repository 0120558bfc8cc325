"""Text to train on, byte by byte: the Python standard library's own sources, a file, or the files of a folder.

The bytes are read where they lie on disk, a window at a time. Every tenth block of the text is for validation, whatever
the seed, and no window crosses from one part to the other. A dataset here maps a key `(epoch, indices)` to a batch
`(tokens (B, N) int64, targets (B, N) int64)`; what is random about a window depends on (seed, epoch, index) alone.
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lean_arch.models.lean_sequence import BYTES, IGNORED, Special
from lean_arch.training.config import InputError, TrainConfig

BLOCK = 2**17  # bytes
PARTS = 10  # blocks of which the last is for validation
PIECE, PIECES = 2**16, 2**12  # bytes, and most of those that a text's digest is of
HIDDEN = 0.15  # share of the bytes that a masked model has to find (Devlin et al. 2018, arXiv 1810.04805, section 3.1)


class Text:
    """Files as one run of bytes. Only their names and sizes are kept, so each worker process maps them itself."""

    def __init__(self, files: Iterable[pathlib.Path]):
        sizes = [(file, file.stat().st_size) for file in files]
        self.files = [file for file, size in sizes if size]
        self.ends = np.cumsum([size for _, size in sizes if size], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.files else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Bytes `start` to `stop`, uint8."""
        pieces, number = [], int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            begin, end = (int(self.ends[number - 1]) if number else 0), int(self.ends[number])
            file = np.memmap(self.files[number], np.uint8, "r", shape=end - begin)
            pieces.append(np.asarray(file[start - begin : min(stop, end) - begin]))
            start, number = end, number + 1
        return np.concatenate(pieces)

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the length and the bytes: of all up to 256 MiB, of as many spread evenly over a longer text."""
        length = len(self)
        found = hashlib.blake2b(length.to_bytes(8), digest_size=16)
        count = min(-(-length // PIECE), PIECES)
        for start in (number * length // count for number in range(count)):
            found.update(self.read(start, min(start + PIECE, length)))
        return found.hexdigest()


class Windows(Dataset):
    """Windows of `seq_len` bytes from one part of a text, with the targets of an objective.

    They lie side by side; in training each is moved on by less than its length, anew in every epoch. Validation takes
    at most `most` of them, spread evenly.

    Args:
        objective: "causal", whose targets are the next bytes, or "masked": BERT's 15% of the bytes are targets, of
            which 80% are hidden behind a mask, 10% replaced by a byte at random and 10% left.
    """

    def __init__(self, text: Text, seq_len: int, objective: str, seed: int, train: bool, most: int | None = None):
        self.text, self.seq_len, self.seed, self.train = text, seq_len, seed, train
        self.causal = objective == "causal"
        self.width = seq_len + self.causal
        self.starts, self.stops = split(len(text), train)
        counts = np.maximum((self.stops - self.starts - self.width) // seq_len + 1, 0)
        self.ends = np.cumsum(counts)  # windows up to each stretch
        self.total = int(self.ends[-1]) if len(self.ends) else 0
        self.length = min(self.total, most or self.total)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: tuple[int, list[int]]) -> tuple[Tensor, Tensor]:
        epoch, indices = key
        pairs = [self._window(index, np.random.default_rng([self.seed, epoch, index])) for index in indices]
        tokens, targets = (torch.from_numpy(np.stack(part)) for part in zip(*pairs))
        return tokens, targets

    def _window(self, index: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        start = self._start(index * self.total // self.length)
        if self.train:
            stop = self.stops[np.searchsorted(self.starts, start, side="right") - 1]
            start = min(start + int(draw.integers(self.seq_len)), int(stop) - self.width)
        window = self.text.read(start, start + self.width).astype(np.int64)
        return (window[:-1], window[1:]) if self.causal else hide(window, draw)

    def _start(self, number: int) -> int:
        stretch = int(np.searchsorted(self.ends, number, side="right"))
        before = int(self.ends[stretch - 1]) if stretch else 0
        return int(self.starts[stretch]) + (number - before) * self.seq_len


def split(length: int, train: bool) -> tuple[np.ndarray, np.ndarray]:
    """Where the stretches of one part of a text of `length` bytes start and stop."""
    block = min(BLOCK, length // PARTS)
    if block == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    rounds = np.arange(0, length, PARTS * block)
    last = rounds + (PARTS - 1) * block
    starts, stops = (rounds, last) if train else (last, last + block)
    starts, stops = np.minimum(starts, length), np.minimum(stops, length)
    return starts[starts < stops], stops[starts < stops]


def hide(window: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(what a masked model sees, its targets) of `window` (N,); at least one byte is a target."""
    chosen = draw.random(len(window)) < HIDDEN
    chosen[draw.integers(len(window))] |= not chosen.any()
    fate, other = draw.random(len(window)), draw.integers(BYTES, size=len(window))
    seen = np.where(fate < 0.8, int(Special.MASK), np.where(fate < 0.9, other, window))
    return np.where(chosen, seen, window), np.where(chosen, window, IGNORED)


@dataclasses.dataclass
class TextData:
    """Two datasets of windows, and what the loop must know of them; in the words of `lean_arch.training.data.Data`."""

    train: Windows
    val: Windows
    seq_len: int

    unit = "sequences"

    @property
    def digest(self) -> str:
        return self.train.text.digest

    @property
    def size(self) -> str:
        return f"{self.seq_len} bytes"

    @property
    def facts(self) -> dict:
        return {"seq_len": self.seq_len}

    def speed(self, samples_per_s: float) -> str:
        return f"{samples_per_s * self.seq_len:,.0f} tokens/s"

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """Tensors of the shapes and dtypes of `count` windows and their targets."""
        return torch.empty(count, self.seq_len, dtype=torch.int64), torch.empty(count, self.seq_len, dtype=torch.int64)

    @staticmethod
    def loss(model: nn.Module, tokens: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
        """Summed over the targets that count."""
        return model(tokens, targets=targets, label_smoothing=label_smoothing)


def open_text(config: TrainConfig, seq_len: int, objective: str) -> TextData:
    """The windows that `config.data` names: "text", or "text:FILE_OR_FOLDER". Raises InputError where it cannot be."""
    place = config.data.partition(":")[2]
    files = files_of(pathlib.Path(place)) if place else standard_library()
    text = Text(files)
    train = Windows(text, seq_len, objective, config.seed, True)
    val = Windows(text, seq_len, objective, 0, False, config.val_windows)
    if not len(train) or not len(val):
        longest = min(BLOCK, len(text) // PARTS) - 1
        works = f"up to {longest} would work" if longest > 0 else "a longer text would work"
        raise InputError(f"seq_len {seq_len} is too long for {config.data!r}, a text of {len(text)} bytes; {works}")
    return TextData(train, val, seq_len)


def standard_library() -> list[pathlib.Path]:
    """The sources of the running interpreter's standard library, in sorted order."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in walk(root, {"site-packages", "dist-packages"}) if file.suffix == ".py"]
    if not files:
        raise InputError(f"data 'text' found no sources of Python in {root}; text:FILE_OR_FOLDER works")
    return files


def files_of(place: pathlib.Path) -> list[pathlib.Path]:
    """`place` itself, or the text files in it, in sorted order: those without a zero byte near their start."""
    if place.is_file():
        return [place]
    files = [file for file in walk(place) if is_text(file)]
    if not files:
        raise InputError(f"data 'text:{place}' holds no text; a file, or a folder with text files in it, works")
    return files


def walk(root: pathlib.Path, without: Iterable[str] = ()) -> list[pathlib.Path]:
    """The files below `root`, sorted by their path, but nothing hidden and no folder named in `without`."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in without and not name.startswith(".")]
        found += [pathlib.Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(file for file in found if file.is_file())


def is_text(file: pathlib.Path) -> bool:
    with open(file, "rb") as opened:
        return b"\0" not in opened.read(8192)
