"""LSH attention: against a reference written anew here, its limits, and what it holds and costs."""

import math
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils.flop_counter import FlopCounterMode

from lean_arch.ops import lsh_attention, use
from lean_arch.ops.attention import lsh
from lean_arch.ops.attention.lsh import bucket_sets, sort_tokens
from tests.ruler import peak_bytes

CASES = {  # B, H, N, D, bucket_size, n_hashes, causal, key_lengths
    "one round": (2, 3, 37, 16, 8, 1, False, None),
    "rounds": (2, 3, 37, 16, 8, 3, False, None),
    "causal": (1, 2, 100, 40, 7, 4, True, None),
    "lengths": (2, 2, 65, 24, 16, 2, False, [50, 0]),
    "causal lengths": (3, 2, 41, 8, 8, 3, True, [41, 1, 9]),
    "one chunk": (2, 1, 20, 16, 64, 2, True, [20, 7]),
    "two chunks": (1, 2, 33, 256, 20, 2, False, [31]),
    "wide": (1, 1, 70, 256, 32, 1, False, None),
    "two heads": (1, 2, 40, 16, 8, 2, True, [33]),
    "one head": (1, 1, 35, 24, 8, 2, False, None),
    "one token": (2, 1, 1, 8, 4, 2, True, [1, 0]),
    "chunks of one": (1, 2, 9, 8, 1, 3, False, None),
}


def error(got, want):
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item() if want.any() else got.abs().max().item()


def inputs(name, dtype=torch.float32, seed=0):
    batch, heads, length, size, bucket, rounds, causal, lengths = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    qk, v = torch.randn(2, batch, length, heads, size, generator=generator, dtype=torch.float64).transpose(2, 3)
    lengths = None if lengths is None else torch.tensor(lengths)
    options = {"bucket_size": bucket, "n_hashes": rounds, "causal": causal, "key_lengths": lengths}
    return [t.to(dtype).requires_grad_() for t in (qk, v)], options


def rotations(name, seed):
    _, heads, length, size, bucket, rounds, *_ = CASES[name]
    number = sum(bucket_sets(length, bucket)) // 2
    rounds = rounds if number else 1
    return torch.randn(heads, size, rounds, number, generator=torch.Generator().manual_seed(seed))


def textbook(qk, v, turns, bucket_size, causal, key_lengths, **_):
    """Token by token: hash, sort and chunk as section 2 of the paper says, in Python; then one softmax over a list."""
    batch, heads, length, size = qk.shape
    keys, out = normalize(qk, dim=-1), []
    bucket_size = length if length <= 2 * bucket_size else bucket_size
    for b in range(batch):
        end = length if key_lengths is None else int(key_lengths[b])
        for h in range(heads):
            seen = [[] for _ in range(length)]
            for r in range(turns.shape[2]):
                turned = qk[b, h].detach().float() @ turns[h, :, r]
                buckets = torch.cat([turned, -turned], -1).argmax(-1).tolist() if turned.numel() else [0] * length
                order = sorted(range(length), key=lambda t: (t >= end, buckets[t] * (t < end), t))
                for place, token in enumerate(order):
                    first = max(place // bucket_size - 1, 0) * bucket_size
                    window = order[first : (place // bucket_size + 1) * bucket_size]
                    seen[token] += [j for j in window if j < end and (j <= token or not causal)]
            for token in range(length):
                others = [j for j in seen[token] if j != token] or seen[token]
                scores = keys[b, h, others] @ qk[b, h, token] / math.sqrt(size)
                out.append(torch.softmax(scores, 0) @ v[b, h, others])
    return torch.stack(out).view(batch, heads, length, size)


def differentiated(fn, qk, v, upstream):
    out = fn(qk, v)
    return out.detach(), *torch.autograd.grad(out, (qk, v), upstream.to(out.dtype))


def compare(name, dtype, tolerance, backend):
    (qk, v), options = inputs(name, dtype)
    upstream = torch.randn(qk.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with use(backend):
        generator = torch.Generator().manual_seed(2)
        got = differentiated(lambda qk, v: lsh_attention(qk, v, generator=generator, **options), qk, v, upstream)
    exact = [t.detach().double().requires_grad_() for t in (qk, v)]
    turns = rotations(name, 2)
    want = differentiated(lambda qk, v: textbook(qk, v, turns, **options), *exact, upstream)
    for what, g, w in zip(("out", "dqk", "dv"), got, want):
        assert g.dtype == dtype
        assert error(g, w) <= tolerance, f"{name} {dtype} {what}: {error(g, w):.1e}"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_values_and_gradients(name, backend):
    compare(name, torch.float32, 3e-6, backend)
    compare(name, torch.float64, 1e-12, backend)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    compare("lengths", dtype, 6e-3, "torch")


def test_triton_kernels_interpreted():
    program = (
        "import torch; from tests.ops.attention.test_lsh import CASES, compare\n"
        "for name in ('two heads', 'one head', 'one token'):\n"
        "    compare(name, torch.float32, 1e-5, 'triton')\n"
        "compare('two heads', torch.float16, 1e-2, 'triton')"
    )
    root = pathlib.Path(lsh.__file__).parents[3]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bucket_size", [16, 31, 64])
def test_up_to_two_buckets_it_is_full_attention(causal, bucket_size):
    qk, v = torch.randn(2, 2, 3, 31, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = qk @ normalize(qk, dim=-1).mT / math.sqrt(24) - 1e5 * torch.eye(31)
    if causal:
        scores = scores.masked_fill(torch.ones(31, 31).triu(1).bool(), -math.inf)
    for rounds in (1, 3):
        out = lsh_attention(qk.float(), v.float(), n_hashes=rounds, bucket_size=bucket_size, causal=causal)
        assert error(out, torch.softmax(scores, -1) @ v) < 1e-6


@pytest.mark.parametrize("scores", [2**10, 2**12])
def test_groups_change_nothing(monkeypatch, scores):
    """Chunks and heads go through in groups of any size, also where a group holds the end of one head and another's."""
    from lean_arch.ops.attention import lsh_portable

    for setting in (lsh.AT_ONCE, lsh_portable.SCORES):
        monkeypatch.setitem(setting, "cpu", scores)
    for name in ("causal", "lengths"):
        compare(name, torch.float64, 1e-12, "torch")


def test_large_and_zero_tokens_stay_finite():
    (qk, v), options = inputs("causal")
    with torch.no_grad():
        qk *= 1e4
        qk[:, :, 5:9] = 0
    got = differentiated(lambda qk, v: lsh_attention(qk, v, **options), qk, v, torch.ones(qk.shape))
    assert all(t.isfinite().all() for t in got)


def test_tokens_beyond_the_length_change_nothing():
    (qk, v), options = inputs("lengths")
    upstream = torch.randn(qk.shape)
    upstream[0, :, 50:] = 0
    runs = []
    for filler in (0.0, 100.0):
        with torch.no_grad():
            for t in (qk, v):
                t[0, :, 50:] = filler
                t[1] = filler
        options["generator"] = torch.Generator().manual_seed(0)
        runs.append(differentiated(lambda qk, v: lsh_attention(qk, v, **options), qk, v, upstream))
    for one, other in zip(*runs):
        assert torch.equal(one[0, :, :50], other[0, :, :50])
        assert not one[1].any()
        assert not other[1].any()
    assert not runs[1][1][0, :, 50:].any()
    assert not runs[1][2][0, :, 50:].any()


def test_seeds():
    (qk, v), options = inputs("rounds")
    torch.manual_seed(3)
    first, second = lsh_attention(qk, v, **options), lsh_attention(qk, v, **options)
    torch.manual_seed(3)
    assert torch.equal(first, lsh_attention(qk, v, **options))
    assert not torch.equal(first, second)
    runs = [lsh_attention(qk, v, **options, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*runs)
    grads = [torch.autograd.grad(run.square().sum(), (qk, v)) for run in runs]
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_checkpointed_it_repeats_itself():
    (qk, v), options = inputs("rounds")
    torch.manual_seed(0)
    plain = torch.autograd.grad(lsh_attention(qk, v, **options).square().sum(), (qk, v))
    torch.manual_seed(0)
    out = torch.utils.checkpoint.checkpoint(lambda a, b: lsh_attention(a, b, **options), qk, v, use_reentrant=False)
    again = torch.autograd.grad(out.square().sum(), (qk, v))
    assert all(torch.equal(a, b) for a, b in zip(plain, again))


def test_buckets():
    assert bucket_sets(128, 64) == ()
    assert bucket_sets(129, 64) == (2,)
    assert bucket_sets(8192, 64) == (128,)
    for length in (10_000, 65_536, 2**20):
        sets = bucket_sets(length, 64)
        assert len(sets) == 2
        assert all(number % 2 == 0 for number in sets)
        assert 0.8 < math.prod(sets) * 64 / length < 1.25


def test_sorting_by_two_sets_of_rotations():
    qk = torch.randn(2, 3, 50, 8, generator=torch.Generator().manual_seed(0))
    turns = torch.randn(3, 8, 2, 5, generator=torch.Generator().manual_seed(1))
    order = sort_tokens(qk, turns, None, (4, 6))
    for b, h, r in ((0, 0, 0), (1, 2, 1)):
        x = qk[b, h] @ turns[h, :, r]
        one, two = (torch.cat([part, -part], -1).argmax(-1).tolist() for part in (x[:, :2], x[:, 2:]))
        assert order[b, h, r].tolist() == sorted(range(50), key=lambda t: (one[t], two[t], t))


def test_rounds_find_what_full_attention_sees():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(16, 32, generator=generator) * 9
    qk = centres[torch.randint(16, (512,), generator=generator)] + torch.randn(512, 32, generator=generator)
    qk, v = qk[None, None], torch.randn(1, 1, 512, 32, generator=generator)
    full = lsh_attention(qk, v, bucket_size=512)
    errors = [error(lsh_attention(qk, v, n_hashes=n, bucket_size=32, generator=generator), full) for n in (1, 2, 8)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.6 * errors[0]


def test_torch_is_told_what_it_is():
    (qk, v), options = inputs("causal lengths")
    turns = rotations("causal lengths", 0)
    arguments = (qk, v, turns, options["key_lengths"].int(), 8, True, "torch")
    torch.library.opcheck(torch.ops.lean_arch.lsh_attention.default, arguments)


def test_flops_are_those_of_the_windows_and_the_rotations():
    qk, v = (torch.randn(1, 2, 256, 32, requires_grad=True) for _ in range(2))
    with FlopCounterMode(display=False) as counter:
        lsh_attention(qk, v, n_hashes=3, bucket_size=16).sum().backward()
    products, tokens, buckets = 7, 2 * 256, 16  # two forward and five backward; of both heads
    assert counter.get_total_flops() == 2 * 32 * tokens * 3 * (products * 2 * 16 + buckets // 2)


def test_compiled_without_a_graph_break():
    (qk, v), options = inputs("causal lengths")

    def run(qk, v):
        return torch.tanh(lsh_attention(qk * 2, v, **options)).sum()

    results = []
    for fn in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        results.append(torch.autograd.grad(fn(qk, v), (qk, v)))
    assert all(error(a, b) < 1e-6 for a, b in zip(*results))


def test_compiled_once_for_all_lengths():
    def run(qk, v):
        return lsh_attention(qk * 1.0, v, n_hashes=2, bucket_size=8).square().sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (40, 100):
        qk, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(2))
        results = []
        for fn in (run, compiled):
            torch.manual_seed(0)
            results.append(torch.autograd.grad(fn(qk, v), (qk, v)))
        assert all(error(a, b) < 1e-6 for a, b in zip(*results))


def test_autocast():
    (qk, v), options = inputs("one round")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = lsh_attention(qk, v, **options)
    assert out.dtype == torch.bfloat16
    assert torch.autograd.grad(out.sum(), qk)[0].dtype == torch.float32


def test_memory_is_linear_and_inputs_are_not_copied(monkeypatch):
    from lean_arch.ops.attention import lsh_portable

    monkeypatch.setitem(lsh_portable.SCORES, "cpu", 2**17)

    def peak(length):
        x = torch.randn(1, length, 2, 8, 32)
        qk, v = (t.requires_grad_() for t in x.permute(2, 0, 3, 1, 4))
        return peak_bytes(
            lambda: lsh_attention(qk, v, n_hashes=2, bucket_size=32, causal=True).square().sum().backward()
        )

    short, long = peak(2048), peak(8192)
    whole = 8192 * 8 * 32 * 4
    assert long < 4.2 * short
    assert long < 5.1 * whole  # out, its gradient, the square's, two gradients: five


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("shape", "rounds", "bucket_size", "lengths"),
    [((1, 8, 1024, 64), 4, 64, None), ((2, 4, 1000, 24), 2, 64, [997, 1000]), ((3, 2, 333, 8), 8, 4, None)],
)
def test_scratch_is_known(dtype, causal, shape, rounds, bucket_size, lengths):
    """What the planner adds for the operator's own temporaries; in the last case most of them are of sorting."""
    qk, v, grad = (torch.randn(shape).to(dtype) for _ in range(3))
    turns = torch.randn(shape[1], shape[3], rounds, sum(bucket_sets(shape[2], bucket_size)) // 2)
    problem = None if lengths is None else torch.tensor(lengths, dtype=torch.int32), bucket_size, causal
    out, lse, order = torch.ops.lean_arch.lsh_attention(qk, v, turns, *problem, "torch")
    forward = turns, *problem, "torch"
    backward = out, lse, order, *problem, "torch"
    took = peak_bytes(lambda: torch.ops.lean_arch.lsh_attention(qk, v, *forward))
    took -= out.nbytes + lse.nbytes + order.nbytes
    assert 0.98 * took < lsh.forward_scratch(qk, turns, *problem) < 1.05 * took
    took = peak_bytes(lambda: torch.ops.lean_arch.lsh_attention_backward(grad, qk, v, *backward))
    took -= qk.nbytes + v.nbytes
    assert 0.98 * took < lsh.backward_scratch(qk, rounds, *problem) < 1.05 * took


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"qk": torch.zeros(2, 4, 8)}, "qk must be a tensor"),
        ({"v": torch.zeros(1, 2, 5, 8)}, "v is .* same shape"),
        ({"v": torch.zeros(1, 2, 4, 8).double()}, "v is torch.float64"),
        ({"qk": torch.zeros(1, 2, 4, 8).long()}, "qk is torch.int64"),
        ({"qk": torch.zeros(1, 2, 4, 4), "v": torch.zeros(1, 2, 4, 4)}, "head size 4"),
        ({"n_hashes": 0}, "n_hashes 0"),
        ({"n_hashes": 2.5}, "n_hashes 2.5"),
        ({"causal": "no"}, "causal 'no' must be True or False"),
        ({"generator": 5}, "generator 5 must be a torch.Generator"),
        ({n: torch.zeros(1, 0, 4, 8) for n in ("qk", "v")}, "it takes one or more heads and tokens"),
        ({"bucket_size": -1}, "bucket_size -1"),
        ({"bucket_size": 2.5}, "bucket_size 2.5"),
        ({"key_lengths": torch.zeros(3, dtype=torch.int64)}, "key_lengths"),
        ({"key_lengths": torch.zeros(1)}, "key_lengths"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    arguments = {"qk": torch.zeros(1, 2, 4, 8), "v": torch.zeros(1, 2, 4, 8)} | arguments
    with pytest.raises(ValueError, match=message):
        lsh_attention(arguments.pop("qk"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_no_sequences(backend):
    qk, v = (torch.zeros(0, 2, 40, 8, requires_grad=True) for _ in range(2))
    with use(backend):
        out = lsh_attention(qk, v, n_hashes=2, bucket_size=8)
    assert out.shape == qk.shape
    assert all(g.shape == qk.shape for g in torch.autograd.grad(out.sum(), (qk, v)))


def test_no_second_derivative():
    (qk, v), options = inputs("one round")
    (grad,) = torch.autograd.grad(lsh_attention(qk, v, **options).square().sum(), qk, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()
