import argparse
import concurrent.futures
import functools
import math
import multiprocessing
import pathlib
import tempfile
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.stdlib_facts import LENGTH, two_tasks
from benchmarks.table import write_rows
from lean_arch import adapters
from lean_arch.blocks import MemoryLayer

OLD, NEW = 900, 300  # facts of A, of B, about
DIM, DEPTH, HEADS = 64, 3, 4
MEMORY = {"num_keys": 256, "num_heads": 8, "top_k": 4, "key_dim": 32}
BASE_RATE, BASE_EPOCHS, BASE_BATCH = 4e-3, 20, 64
EPOCHS, BATCH = 30, 32
TUNING_SEED, TOLERANCE = 0, 0.05
Task = tuple[Tensor, Tensor]  # tokens, targets (facts, N)


class Block(nn.Module):
    """Causal attention and a feed-forward layer, or a memory in its place."""

    def __init__(self, memory: bool):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        wide = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.mlp = MemoryLayer(DIM, **MEMORY) if memory else wide

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Predicts the next token; the middle block has the memory."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, DIM), nn.Embedding(LENGTH, DIM)
        nn.init.normal_(self.embed.weight, std=DIM**-0.5)
        nn.init.normal_(self.position.weight, std=DIM**-0.5)
        self.blocks = nn.Sequential(*(Block(number == DEPTH // 2) for number in range(DEPTH)))
        self.norm = nn.RMSNorm(DIM)

    def forward(self, tokens: Tensor, where: Tensor | None = None) -> Tensor:
        """(B, N) -> logits (B, N, V), or (n, V) of the n places where `where` (B, N) is True."""
        x = self.blocks(3 * self.embed(tokens) + self.position.weight[: tokens.shape[1]])
        return 3 * self.norm(x if where is None else x[where]) @ self.embed.weight.T


def trimmed(task: Task, facts: Tensor) -> Task:
    """Some facts, without columns that are empty in all of them."""
    tokens, targets = (tensor[facts] for tensor in task)
    length = (tokens > 0).any(0).sum()
    return tokens[:, :length], targets[:, :length]


def learn(model: Model, task: Task, optimizers: list, epochs: int, batch: int) -> None:
    """Cross-entropy of the answers; rates rise for a twentieth of the steps and fall to 0."""
    steps = epochs * math.ceil(len(task[0]) / batch)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda s: min((s + 1) / (0.05 * steps + 1), 1) * (1 - s / steps))
        for o in optimizers
    ]
    model.train()
    for _ in range(epochs):
        for facts in torch.randperm(len(task[0])).split(batch):
            tokens, targets = trimmed(task, facts)
            where = targets >= 0
            loss = F.cross_entropy(model(tokens, where), targets[where])
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in (*optimizers, *schedules):
                optimizer.step()
    model.eval()


@torch.no_grad()
def known(model: Model, task: Task) -> float:
    """The share of facts whose answer comes out right, word by word."""
    right = 0
    for facts in torch.arange(len(task[0])).split(256):
        tokens, targets = trimmed(task, facts)
        right += ((model(tokens).argmax(-1) == targets) | (targets < 0)).all(1).sum().item()
    return right / len(task[0])


def of_everything(model: Model, rate: float, decay: float = 0.0) -> list:
    """AdamW; of tables with sparse gradients SparseAdam, which moves the rows that a batch reads."""
    tables = [layer.values for layer in model.modules() if isinstance(layer, MemoryLayer)]
    others = [p for p in model.parameters() if all(p is not table for table in tables)]
    return [torch.optim.AdamW(others, rate, weight_decay=decay), torch.optim.SparseAdam(tables, rate)]


def full(model: Model, old: Task, rate: float) -> list:
    return of_everything(model, rate)


def by_adapter(model: Model, old: Task, rate: float, method: str) -> list:
    adapters.attach(model, method)
    return [torch.optim.AdamW(adapters.trainable_parameters(model), rate, weight_decay=0.0)]


def by_memory(model: Model, old: Task, rate: float, ranking: str, top_t: int) -> list:
    background = adapters.count_slots(model, (trimmed(old, facts)[0] for facts in torch.arange(len(old[0])).split(64)))
    capacity = MEMORY["num_keys"] ** 2
    adapters.attach(model, "memory", background=background, ranking=ranking, top_t=top_t, capacity=capacity)
    return [adapters.RowAdam(adapters.trainable_parameters(model), rate)]


METHODS: dict[str, tuple[Callable, tuple[float, ...]]] = {  # what prepares the model, and learning rates to try
    "full": (full, (3e-4, 1e-3, 3e-3)),
    "lora": (functools.partial(by_adapter, method="lora"), (3e-3, 1e-2, 3e-2)),
    "sparse": (functools.partial(by_adapter, method="sparse"), (3e-3, 1e-2, 3e-2)),
    "sparse_memory": (functools.partial(by_memory, ranking="lift", top_t=2000), (0.1, 0.3, 1.0)),
    "sparse_memory_tf_idf": (functools.partial(by_memory, ranking="tf_idf", top_t=500), (0.1, 0.3, 1.0)),
}


@functools.cache
def tasks(seed: int) -> tuple[Task, Task, int]:
    return two_tasks(seed, OLD, NEW)


def base(seed: int, folder: pathlib.Path) -> None:
    """Trains the model that all methods begin with, on task A."""
    torch.manual_seed(seed)
    old, _, vocabulary = tasks(seed)
    model = Model(vocabulary)
    learn(model, old, of_everything(model, BASE_RATE, decay=0.01), BASE_EPOCHS, BASE_BATCH)
    torch.save(model.state_dict(), folder / f"{seed}.pt")


def compare(method: str, seed: int, rate: float, folder: pathlib.Path) -> dict:
    """The row of a method with a learning rate."""
    old, new, vocabulary = tasks(seed)
    model = Model(vocabulary).eval()
    model.load_state_dict(torch.load(folder / f"{seed}.pt"))
    row = {"method": method, "seed": seed, "old_before": known(model, old), "new_before": known(model, new)}
    torch.manual_seed(seed)
    start = time.perf_counter()
    learn(model, new, METHODS[method][0](model, old, rate), EPOCHS, BATCH)
    row |= {"old_after": known(model, old), "new_after": known(model, new), "learning_rate": rate}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return row | {"trained": trained, "seconds": round(time.perf_counter() - start, 1)}


def chosen(rows: list[dict]) -> float:
    """The learning rate of those rows that keeps most of A, where B is learned nearly as well as with any."""
    enough = max(row["new_after"] for row in rows) - TOLERANCE
    return max((row for row in rows if row["new_after"] >= enough), key=lambda row: row["old_after"])["learning_rate"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help=f"not {TUNING_SEED}, that of tuning")
    parser.add_argument("--jobs", type=int, default=2, help="models trained at a time, on a core each")
    parser.add_argument("--csv", help="default: a name made of machine, torch and date, under benchmarks/results/")
    args = parser.parse_args()
    if TUNING_SEED in args.seeds:
        parser.error(f"argument --seeds: {TUNING_SEED} is the seed that learning rates are chosen on; others work")
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as name,
        concurrent.futures.ProcessPoolExecutor(args.jobs, spawn, torch.set_num_threads, (1,)) as pool,
    ):
        folder = pathlib.Path(name)
        run = functools.partial(compare, folder=folder)
        list(pool.map(functools.partial(base, folder=folder), [TUNING_SEED, *args.seeds]))
        trials = [(method, TUNING_SEED, rate) for method in args.methods for rate in METHODS[method][1]]
        tried = list(pool.map(run, *zip(*trials)))
        print(*tried, sep="\n", flush=True)
        rates = {method: chosen([row for row in tried if row["method"] == method]) for method in args.methods}
        wanted = [(method, seed, rates[method]) for method in args.methods for seed in args.seeds]
        rows = list(pool.map(run, *zip(*wanted)))
    for row in rows:
        print(row)
    write_rows("continual", rows, args.csv)


if __name__ == "__main__":
    main()
