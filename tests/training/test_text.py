"""Text as data: the bytes of the files, split once and for all, the same windows for the same key."""

import pathlib
import random
import sysconfig

import numpy as np
import pytest
import torch

from lean_arch.models.lean_sequence import IGNORED, VOCABULARY, Special
from lean_arch.training import text as rooms
from lean_arch.training.config import InputError, TrainConfig
from lean_arch.training.data import Batches, loader
from lean_arch.training.text import Text, Windows, files_of, hide, open_text, split, standard_library


def letters(path, count, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(np.random.default_rng(seed).integers(97, 123, count, dtype=np.uint8).tobytes())
    return path


def test_files_are_read_as_one(tmp_path):
    for number, size in enumerate([5, 0, 1, 300, 7]):
        letters(tmp_path / f"{number}.txt", size, number)
    files = sorted(tmp_path.iterdir())
    whole = b"".join(file.read_bytes() for file in files)
    text = Text(files)
    assert len(text) == 313
    for start, stop in ((0, 313), (0, 1), (4, 7), (5, 6), (6, 306), (305, 313), (312, 313)):
        assert text.read(start, stop).tobytes() == whole[start:stop]


def test_a_file_larger_than_memory_is_read_where_it_lies(tmp_path):
    with open(tmp_path / "large", "wb") as file:
        file.truncate(2**40)  # takes no place on the disk
        file.seek(2**39)
        file.write(b"here")
    text = Text([tmp_path / "large"])
    assert text.read(2**39 - 1, 2**39 + 5).tobytes() == b"\0here\0"
    windows = Windows(text, 100, "causal", 0, True)
    assert windows[0, [len(windows) - 1]][0].shape == (1, 100)


@pytest.mark.parametrize("length", [0, 9, 10, 995, 40_000, 3_000_001])
def test_every_byte_is_in_one_part(length):
    marks = np.zeros(length, int)
    for train in (True, False):
        for start, stop in zip(*split(length, train), strict=True):
            marks[start:stop] += 1 if train else 10
    assert set(marks) <= ({1, 10} if length >= 10 else {0})
    if length >= 10:
        assert (marks == 10).mean() == pytest.approx(0.1, abs=0.06)


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_no_window_crosses_the_split(tmp_path, monkeypatch, objective):
    monkeypatch.setattr(rooms, "BLOCK", 1000)
    text = Text([letters(tmp_path / "a", 33_333)])
    for train in (True, False):
        windows = Windows(text, 64, objective, seed=3, train=train)
        read = []
        monkeypatch.setattr(text, "read", lambda a, b, read=read: read.append((a, b)) or np.zeros(b - a, np.uint8))
        windows[0, list(range(len(windows)))], windows[1, list(range(len(windows)))]
        stretches = list(zip(*split(33_333, train), strict=True))
        assert all(any(a <= start and stop <= b for a, b in stretches) for start, stop in read)
        covered = np.zeros(33_333, bool)
        for start, stop in read:
            covered[start:stop] = True
        assert covered.sum() > 0.85 * sum(b - a for a, b in stretches)
        assert len({a % 64 for a, _ in read}) > 30 or not train


def test_targets_are_the_next_bytes(tmp_path):
    text = Text([letters(tmp_path / "a", 9000)])
    windows = Windows(text, 50, "causal", seed=0, train=True)
    tokens, targets = windows[0, [0, 3, 4]]
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.shape == targets.shape == (3, 50)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    line = (tmp_path / "a").read_bytes()
    for row, last in zip(tokens.tolist(), targets[:, -1].tolist(), strict=True):
        assert bytes([*row, last]) in line


def test_hidden_bytes_are_those_of_bert():
    window = np.full(200_000, 120)
    seen, targets = hide(window, np.random.default_rng(0))
    chosen = targets != IGNORED
    assert (targets[chosen] == 120).all()
    assert (seen[~chosen] == 120).all()
    assert chosen.mean() == pytest.approx(0.15, abs=0.005)
    assert (seen[chosen] == Special.MASK).mean() == pytest.approx(0.8, abs=0.01)
    kept = 0.1 + 0.1 / 256
    assert (seen[chosen] == 120).mean() == pytest.approx(kept, abs=0.01)
    assert seen.max() < VOCABULARY
    assert all((hide(window[:3], np.random.default_rng(n))[1] != IGNORED).any() for n in range(50))


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_a_window_depends_on_seed_epoch_and_index_alone(tmp_path, objective):
    text = Text([letters(tmp_path / "a", 50_000)])
    windows = Windows(text, 100, objective, seed=3, train=True)
    tokens, targets = windows[2, [7, 100, 9]]
    alone = windows[2, [100]]
    assert torch.equal(tokens[1:2], alone[0])
    assert torch.equal(targets[1:2], alone[1])
    for other in (windows[3, [100]], Windows(text, 100, objective, seed=4, train=True)[2, [100]]):
        assert not torch.equal(other[0], alone[0])
    val = [Windows(text, 100, objective, 0, False, most=5)[0, [0, 4]] for _ in range(2)]
    assert torch.equal(val[0][0], val[1][0])
    assert torch.equal(val[0][1], val[1][1])


def test_workers_give_the_same_windows_and_leave_the_random_streams_alone(tmp_path):
    text = Text([letters(tmp_path / "a", 20_000)])
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    runs = []
    for workers in (0, 2):
        windows = Windows(text, 90, "masked", seed=1, train=True)
        config = TrainConfig(arch="lean_lm", workers=workers)
        runs.append(list(loader(windows, Batches(len(windows), 40, seed=1), config)))
    assert len(runs[0]) == 5
    for (tokens, targets), (same, too) in zip(*runs, strict=True):
        assert torch.equal(tokens, same)
        assert torch.equal(targets, too)
    assert random.getstate() == before[0]
    assert (np.random.get_state()[1] == before[1]).all()
    assert torch.equal(torch.get_rng_state(), before[2])


def test_validation_windows_are_spread_and_bounded(tmp_path):
    text = Text([letters(tmp_path / "a", 400_000)])
    some = Windows(text, 100, "causal", 0, False, most=8)
    every = Windows(text, 100, "causal", 0, False)
    assert len(some) == 8 < len(every)
    assert torch.equal(some[0, [4]][0], every[0, [len(every) // 2]][0])
    assert len(Windows(text, 100, "causal", 0, False, most=10**9)) == len(every)


@pytest.mark.parametrize("pieces", [1, 3, 100])
def test_a_digest_tells_texts_apart(tmp_path, monkeypatch, pieces):
    """All of up to 100 pieces of 7 bytes; of more text the pieces that it looks at."""
    monkeypatch.setattr(rooms, "PIECE", 7)
    monkeypatch.setattr(rooms, "PIECES", pieces)
    content = letters(tmp_path / "a" / "whole", 400).read_bytes()
    for name, part in (("one", content[:123]), ("two", content[123:])):
        (tmp_path / name).write_bytes(part)
    digest = Text([tmp_path / "a" / "whole"]).digest
    assert digest == Text([tmp_path / "one", tmp_path / "two"]).digest
    assert digest != Text([tmp_path / "one"]).digest
    for at in range(400):
        (tmp_path / "other").write_bytes(content[:at] + b"?" + content[at + 1 :])
        seen = pieces == 100 or any(at in range(n * 400 // pieces, n * 400 // pieces + 7) for n in range(pieces))
        assert (Text([tmp_path / "other"]).digest != digest) == seen


def test_the_standard_library_is_the_default():
    files = standard_library()
    assert files == sorted(files)
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    assert root / "argparse.py" in files
    assert not any("site-packages" in file.parts for file in files)
    data = open_text(TrainConfig(arch="lean_lm", data="text").settled(), 128, "causal")
    assert data.train[0, [0]][0].shape == (1, 128)
    assert len(data.val) == 128


def test_the_text_files_of_a_folder_in_sorted_order(tmp_path):
    for name in ("b/two.md", "a.txt", "b/.hidden", ".git/config", "c.py"):
        letters(tmp_path / name, 10)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    assert files_of(tmp_path) == [tmp_path / name for name in ("a.txt", "b/two.md", "c.py")]
    assert files_of(tmp_path / "image.png") == [tmp_path / "image.png"]


def test_what_cannot_be_trained_on_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    config = TrainConfig(arch="lean_lm", data=f"text:{tmp_path / 'empty'}").settled()
    with pytest.raises(InputError, match="empty' holds no text"):
        open_text(config, 16, "causal")
    letters(tmp_path / "short", 2000)
    config = TrainConfig(arch="lean_lm", data=f"text:{tmp_path / 'short'}").settled()
    with pytest.raises(InputError, match=r"seq_len 256 is too long for .* 2000 bytes; up to 199 would work"):
        open_text(config, 256, "causal")
    assert len(open_text(config, 199, "causal").val) == 1
