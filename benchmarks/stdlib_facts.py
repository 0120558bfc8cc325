"""Facts to learn by heart that every machine has: which parameters the functions of Python's standard library take.

A fact is a question, "asyncio . locks . Semaphore . acquire (" in pieces of names, and its answer, the names of the
parameters and ")". Those are kept that tell something: of two parameters or more, and the same for three functions at
most. So the facts, a few of them, depend on the version of Python.

Shapes: tokens, targets (facts, LENGTH); -100 is no target, token 0 nothing.
"""

import ast
import collections
import pathlib
import random
import re
import sysconfig
from collections.abc import Iterator

import torch
from torch import Tensor

PIECE = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^A-Za-z\d]")
LEFT_OUT = re.compile(r"(.*/)?(site-packages|tests?|idlelib|lib2to3|turtledemo|ensurepip|test_[^/]*)(/.*)?")
LENGTH, LONGEST_ANSWER = 24, 7
Fact = tuple[str, list[str], list[str]]  # the package, the question, the answer


def signatures() -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """(module, class if any, function), (parameter, ...) of all that are defined at the top of a module or class."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).with_suffix("").as_posix()
        if not LEFT_OUT.fullmatch(name):
            yield from functions(ast.parse(path.read_bytes()), [name.replace("/", ".")])


def functions(node: ast.AST, place: list[str]) -> Iterator[tuple[list[str], tuple[str, ...]]]:
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from functions(child, [place[0], child.name])
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            a = child.args
            names = [p.arg for p in (*a.posonlyargs, *a.args)] + [f"*{p.arg}" for p in [a.vararg] if p]
            names += [p.arg for p in a.kwonlyargs] + [f"**{p.arg}" for p in [a.kwarg] if p]
            yield [*place, child.name], tuple(names[1:] if names[:1] in (["self"], ["cls"]) else names)


def all_facts() -> list[Fact]:
    known = {".".join(path): names for path, names in signatures()}
    alike, found = collections.Counter(known.values()), {}
    for path, names in known.items():
        question, answer = [*PIECE.findall(path), "("], [*names, ")"]
        fits = len(answer) <= LONGEST_ANSWER and len(question) + len(answer) <= LENGTH
        if len(names) >= 2 and alike[names] <= 3 and fits:
            found.setdefault(tuple(question), (path.partition(".")[0], question, answer))
    return list(found.values())


def two_tasks(seed: int, old: int, new: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], int]:
    """(tokens, targets) of about `old` facts, of about `new` others from other packages, and the number of tokens.

    `seed` decides which packages. Facts with a word that no other fact has are left out.
    """
    facts = all_facts()
    words = collections.Counter(word for _, question, answer in facts for word in {*question, *answer})
    vocabulary = {word: number for number, word in enumerate((w for w, n in sorted(words.items()) if n > 1), 1)}
    facts = [fact for fact in facts if all(word in vocabulary for word in fact[1] + fact[2])]
    packages = sorted({package for package, *_ in facts})
    random.Random(seed).shuffle(packages)
    tasks = [], []
    for package in packages:
        mine = [fact for fact in facts if fact[0] == package]
        room = [task for task, size in zip(tasks[::-1], (new, old)) if len(task) + len(mine) <= size]
        if room:
            room[0].extend(mine)
    return *(encoded(task, vocabulary) for task in tasks), len(vocabulary) + 1


def encoded(facts: list[Fact], vocabulary: dict[str, int]) -> tuple[Tensor, Tensor]:
    tokens, targets = torch.zeros(len(facts), LENGTH, dtype=torch.long), torch.full((len(facts), LENGTH), -100)
    for row, (_, question, answer) in enumerate(facts):
        numbers = torch.tensor([vocabulary[word] for word in question + answer])
        tokens[row, : len(numbers)] = numbers
        targets[row, len(question) - 1 : len(numbers) - 1] = numbers[len(question) :]
    return tokens, targets
