"""Sparse memory fine-tuning: which slots move, that no others do, memory, files, merging; RowAdam; insertion."""

import copy
import math

import pytest
import torch
from torch import nn

from lean_arch import adapters
from lean_arch.adapters.memory import SlotCounts, by_kl, by_lift, by_tf_idf
from lean_arch.blocks import MemoryLayer
from tests.ruler import allocations


def model(num_keys=8, dim=12):
    torch.manual_seed(0)
    options = {"num_heads": 2, "top_k": 3}
    return nn.Sequential(nn.Linear(6, dim), MemoryLayer(dim, num_keys, **options), nn.Linear(dim, 4)).eval()


def batches(count=6, seed=1, tokens=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, tokens, 6, generator=generator) for _ in range(count)]


def with_adapter(num_keys=8, **options):
    net = model(num_keys)
    background = adapters.count_slots(net, batches())
    return adapters.attach(net, "memory", name="task", background=background, **{"top_t": 4, "capacity": 20} | options)


def part_of(net):
    return net[1].adapters["task"]


def train(net, steps=4, seed=3, lr=0.1):
    optimizer = adapters.RowAdam(adapters.trainable_parameters(net), lr)
    net.train()
    for x in batches(steps, seed):
        optimizer.zero_grad()
        net(x.to(net[0].weight.dtype)).square().sum().backward()
        optimizer.step()
    return net.eval()


def test_counts_are_those_of_the_reads():
    net, data = model(), batches()
    counts = adapters.count_slots(net, data)["1"]
    reads, documents = torch.zeros(64), torch.zeros(64)
    for x in data:
        for sample in x:
            slots = net[1].read(net[0](sample))[0].flatten()
            reads += torch.bincount(slots, minlength=64)
            documents[slots.unique()] += 1
    assert torch.equal(counts.reads, reads.long())
    assert torch.equal(counts.documents, documents.long())
    assert counts.total == 18
    assert "recall" not in net[1].__dict__


def test_rankings_are_the_papers():
    counts = SlotCounts(torch.tensor([0, 3, 9, 1]), torch.tensor([0, 5, 20, 1]), 9)
    share, slots = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0, 2, 3])
    wanted = [0.5 * math.log(10 / 1), 0.25 * math.log(10 / 10), 0.25 * math.log(10 / 2)]
    torch.testing.assert_close(by_tf_idf(share, counts, slots), torch.tensor(wanted))
    wanted = [p * math.log(p / (q / 30)) for p, q in ((0.5, 1), (0.25, 21), (0.25, 2))]
    torch.testing.assert_close(by_kl(share, counts, slots), torch.tensor(wanted))
    wanted = [p / (q / 30) for p, q in ((0.5, 1), (0.25, 21), (0.25, 2))]
    torch.testing.assert_close(by_lift(share, counts, slots), torch.tensor(wanted))


def test_outputs_are_the_base_s_at_first_and_the_base_comes_back():
    net, x = model(), batches(1)[0]
    plain, state = net(x), copy.deepcopy(net.state_dict())
    background = adapters.count_slots(net, batches())
    adapters.attach(net, "memory", name="task", background=background)
    assert torch.equal(net.train()(x), plain)
    train(net)
    assert not torch.equal(net(x), plain)
    adapters.detach(net, "task")
    assert torch.equal(net(x), plain)
    assert type(net[1]) is MemoryLayer
    assert all(torch.equal(t, state[n]) for n, t in net.state_dict().items())


def test_only_the_slots_that_a_batch_chooses_move():
    net = with_adapter()
    part, layer = part_of(net), net[1]
    for step in range(4):
        net.train()
        x = batches(1, seed=10 + step)[0]
        before, there = part.delta.detach().clone(), part.rows.clone()
        slots, reads = layer.read(net[0](x))[0].unique(return_counts=True)
        scores = by_tf_idf(reads / reads.sum(), part.counts, slots)
        wanted = set(slots[scores.topk(4).indices].tolist())
        optimizer = adapters.RowAdam([part.delta], 0.1)
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = (part.delta != before).any(1)
        assert set(part.rows[moved].tolist()) == wanted
        assert torch.equal(part.rows[there >= 0], there[there >= 0])
    assert 4 < (part.rows >= 0).sum() <= 16


def test_gradients_are_those_of_the_chosen_rows_of_the_table():
    net = with_adapter()
    train(net)
    x, part, layer = batches(1, seed=20)[0], part_of(net), net[1]
    net.train().zero_grad()
    net(x).square().sum().backward()
    twin = model()
    with torch.no_grad():
        taken = part.rows >= 0
        twin[1].values.index_add_(0, part.rows[taken], part.delta[taken])
    twin(x).square().sum().backward()
    dense = twin[1].values.grad.to_dense()
    chosen = part.choose(layer.read(net[0](x))[0])
    rows = [part.rows.tolist().index(slot) for slot in chosen.tolist()]
    torch.testing.assert_close(part.delta.grad[rows], dense[chosen])
    part.delta.grad[rows] = 0
    assert not part.delta.grad.any()


def test_a_step_allocates_nothing_of_the_tables_size():
    net = with_adapter(num_keys=256)
    x = batches(1)[0]

    def step():
        net.train()
        net(x).square().sum().backward()

    # numbers of a slot or fewer, where the table has 12
    assert max(allocations(step)) <= net[1].values.nbytes / 12


def test_a_full_store_says_so_and_goes_on():
    net = with_adapter(capacity=5)
    with pytest.warns(UserWarning, match="all 5 rows of a memory adapter are taken"):
        train(net)
    assert (part_of(net).rows >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_and_files(dtype, tmp_path):
    net = train(with_adapter())
    net.to(dtype)
    x, table = batches(1, seed=5)[0].to(dtype), net[1].values.clone()
    out = net(x)
    adapters.save(net, "task", tmp_path / "task")
    adapters.merge(net, "task")
    torch.testing.assert_close(net(x), out, rtol=0.05 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)
    assert 0 < (net[1].values != table).any(1).sum() <= 20
    adapters.unmerge(net, "task")
    assert torch.equal(net[1].values, table)
    fresh = adapters.load(model().to(dtype), tmp_path / "task")
    assert torch.equal(fresh(x), out)
    one, two = train(net, seed=7), train(fresh, seed=7)
    assert torch.equal(part_of(one).delta, part_of(two).delta)


def test_several_add_up_and_switch():
    net, x = with_adapter(), batches(1, seed=5)[0]
    plain = net(x)
    train(net)
    first = net(x)
    adapters.attach(net, "memory", name="more", background=adapters.count_slots(net, batches()), top_t=4)
    assert torch.equal(net(x), first)
    adapters.activate(net, ())
    assert torch.equal(net(x), plain)
    adapters.activate(net, {"task": 0.5})
    torch.testing.assert_close(net[1].recall(*net[1].read(net[0](x))), halfway(net, x))


def halfway(net, x):
    reads = net[1].read(net[0](x))
    adapters.activate(net, {"task": 1.0})
    whole = net[1].recall(*reads)
    adapters.activate(net, ())
    return (whole + net[1].recall(*reads)) / 2


def test_row_adam_is_adam_where_a_row_has_one_number():
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 5)[:, None].clone()) for _ in range(2))
    one = adapters.RowAdam([ours], 0.1, beta=0.9)
    other = torch.optim.Adam([theirs], 0.1, betas=(0.0, 0.9), eps=1e-10)
    for _ in range(5):
        for parameter, optimizer in ((ours, one), (theirs, other)):
            parameter.grad = (parameter.detach() + 2).cos()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_row_adam_leaves_rows_without_gradient_alone():
    table = nn.Parameter(torch.randn(6, 3))
    optimizer = adapters.RowAdam([table], 0.1)
    grad = torch.randn(6, 3)
    twin = copy.deepcopy(table)
    other = adapters.RowAdam([twin], 0.1)
    for rows in ([0, 2], [2, 5], [0, 1]):
        before = table.detach().clone()
        table.grad = torch.zeros(6, 3).index_copy_(0, torch.tensor(rows), grad[rows])
        twin.grad = torch.sparse_coo_tensor([rows], grad[rows], (6, 3), check_invariants=True)
        optimizer.step()
        other.step()
        assert (table != before).any(1).nonzero()[:, 0].tolist() == rows
        assert torch.equal(table, twin)
    assert sum(t.numel() for t in optimizer.state[table].values()) == 2 * 6


def test_inserted_beside_a_layer_it_changes_nothing_at_first():
    torch.manual_seed(0)
    net = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))})
    x = torch.randn(2, 3, 8)
    before = net["mlp"](x)
    adapters.insert_memory(net, "mlp", 4, num_heads=1, top_k=2)
    assert torch.equal(net["mlp"](x), before)
    net["mlp"](x).sum().backward()
    assert net["mlp"].memory.proj.weight.grad.any()
    assert list(adapters.count_slots(net["mlp"], [x])) == ["memory"]


def test_inserted_in_place_of_a_layer():
    net = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))})
    adapters.insert_memory(net, "mlp", 4, replace=True, num_heads=1, top_k=2)
    assert isinstance(net["mlp"], MemoryLayer)
    assert net["mlp"](torch.randn(2, 8)).shape == (2, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranking": "best"}, "ranking 'best' does not exist"),
        ({"top_t": 0}, "top_t 0 must be"),
        ({"background": None}, "background has no counts of the 64 slots of memory layer '1'"),
        ({"target": "x"}, "target 'x' matches no memory layer; there are 1"),
    ],
)
def test_bad_input_is_refused_by_name(options, message):
    net = model()
    with pytest.raises(ValueError, match=message):
        adapters.attach(net, "memory", **{"background": adapters.count_slots(net, batches(1))} | options)
    assert all(p.requires_grad for p in net.parameters())


def test_no_memory_no_counts():
    with pytest.raises(ValueError, match="has none; insert_memory puts some in"):
        adapters.count_slots(nn.Linear(2, 2), [])
    with pytest.raises(ValueError, match="target 'mlp' matches no layer"):
        adapters.insert_memory(nn.Linear(2, 2), "mlp", 4)
    with pytest.raises(ValueError, match="no feed-forward layer"):
        adapters.insert_memory(nn.Sequential(nn.Linear(2, 3)), "0", 4)
