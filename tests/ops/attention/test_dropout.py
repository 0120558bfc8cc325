"""The hash that dropout draws by: against the published function, in plain Python, and as random numbers."""

import pytest
import torch

from lean_arch.ops.attention.dropout import FIRST, GOLDEN, SECOND, keep, keep_all, mix, row_keys, threshold


def plain_mix(x):
    x ^= x >> 16
    x = x * FIRST % 2**32
    x ^= x >> 15
    x = x * SECOND % 2**32
    return x ^ x >> 16


def test_against_plain_integers():
    seed, heads, p = 0x0123456789ABCDEF, 3, 0.4
    got = keep_all(torch.tensor([seed]), 2, heads, 5, 7, p)
    for b, h, i, j in [(0, 0, 0, 0), (1, 2, 4, 6), (0, 1, 3, 2), (1, 0, 2, 5)]:
        key = plain_mix(plain_mix(plain_mix(seed >> 32) ^ seed & 0xFFFFFFFF) ^ b * heads + h)
        key = plain_mix(key ^ i)
        assert got[b, h, i, j] == (plain_mix(key ^ j * GOLDEN % 2**32) >= p * 2**32)


def test_hash_is_one_to_one_and_wraps():
    x = torch.randint(2**32, (4096,), generator=torch.Generator().manual_seed(0))
    x = torch.cat([x.unique(), torch.tensor([2**32 - 1])]).unique()
    assert mix(x).unique().numel() == x.numel()
    assert mix(x).tolist() == [plain_mix(one) for one in x.tolist()]


def test_parts_are_the_whole():
    seed = torch.tensor([2**61 + 12345])
    whole = keep_all(seed, 2, 3, 50, 40, 0.5)
    part = keep(row_keys(seed, torch.tensor([[4]]), torch.arange(10, 20))[..., None], torch.arange(5, 25), 0.5)
    assert torch.equal(part[0], whole[1, 1, 10:20, 5:25])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_and_independence(p):
    kept = keep_all(torch.tensor([99]), 2, 4, 256, 256, p).double()
    spread = (p * (1 - p)) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 5 * spread / kept.numel() ** 0.5
    off = (kept - (1 - p)) / spread
    pairs = [(off[..., 1:], off[..., :-1]), (off[..., 1:, :], off[..., :-1, :]), (off[:, 1:], off[:, :-1])]
    other = keep_all(torch.tensor([100]), 2, 4, 256, 256, p).double()
    for a, b in [*pairs, (off, (other - (1 - p)) / spread)]:
        assert abs((a * b).mean()) < 5 / a.numel() ** 0.5


def test_thresholds():
    assert threshold(0.5) == 2**31
    assert threshold(1 - 1e-12) == 2**32 - 1
