"""The commands: `python train.py ...` and `lean-arch list | train | compare | plan`."""

import dataclasses
import difflib
import json
import re
import sys
import typing

import jsonargparse
import yaml
from rich.console import Console
from safetensors import SafetensorError

import lean_arch
from lean_arch.training import report
from lean_arch.training.compare import compare as run_comparison
from lean_arch.training.config import InputError, TrainConfig
from lean_arch.training.loop import train as run_training
from lean_arch.training.recipe import prepare

HINTS = typing.get_type_hints(TrainConfig)
USAGE = """\
usage: lean-arch COMMAND [options]

  list [PATTERN]          the zoo's architectures, or those that match a shell pattern
  train --arch NAME ...   train one (lean-arch train --help lists the options)
  compare NAME NAME ...   train each in a process of its own and compare what they cost
  plan --arch NAME ...    what a training run would need, without running it
"""


def main(arguments: list[str] | None = None) -> int:
    """The console script `lean-arch`. Returns the exit status."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    commands = {"list": list_zoo, "train": train, "compare": compare, "plan": plan}
    if command not in commands:
        print(f"command {command!r} does not exist; {', '.join(commands)} do", file=sys.stderr)
        return 2
    return commands[command](rest)


def list_zoo(arguments: list[str]) -> int:
    pattern = arguments[0] if arguments else "*"
    if pattern in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    names = lean_arch.list_models(pattern)
    if not names:
        print(f"pattern {pattern!r} matches none of the zoo; lean_* matches all of it", file=sys.stderr)
        return 2
    print("\n".join(names))
    return 0


def train(arguments: list[str]) -> int:
    """What `train.py` and `lean-arch train` do.

    Returns the exit status: 0, 2 for bad input, 1 for files that cannot be read or written, 130 if interrupted.
    """
    try:
        config = parse(arguments)
        if config.compare is not None:
            run_comparison(config)
            return 0
        if config.dry_run:
            return show_plan(config)
        run_training(config)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, SafetensorError) as error:
        said = " ".join(str(error).split())
        print(f"error: {said}; what was written before stays, and --resume goes on from there", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from the last checkpoint, if there is one", file=sys.stderr)
        return 130
    return 0


def compare(arguments: list[str]) -> int:
    return train(["--compare", *arguments])


def plan(arguments: list[str]) -> int:
    return train([*arguments, "--dry_run"])


def show_plan(config: TrainConfig) -> int:
    console, recipe = Console(), prepare(config)
    report.say_recipe(console, recipe, None)
    plain = recipe.predict_plain() if recipe.has_lean_parts else None
    console.print(report.cost_table(None, recipe.predicted, plain))
    return 0


def parse(arguments: list[str]) -> TrainConfig:
    """The configuration that command-line arguments stand for. Raises InputError; exits after --help."""
    about = "Train an architecture and see what it costs."
    parser = jsonargparse.ArgumentParser(prog="train.py", exit_on_error=False, description=about)
    parser.add_argument("--config", action=jsonargparse.ActionConfigFile, help="a YAML file of these options")
    for field in dataclasses.fields(TrainConfig):
        hint = HINTS[field.name]
        kind = {"action": "store_true"} if hint is bool else {"type": hint, "default": field.default}
        parser.add_argument(f"--{field.name}", help=field.metadata["help"], **kind)
    try:
        values = parser.parse_args(normal_form(arguments)).as_dict()
    except jsonargparse.ArgumentError as error:
        raise InputError(one_sentence(str(error))) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(
            f"config is not a YAML file ({' '.join(str(error).split())}); one option a line works"
        ) from error
    values.pop("config")
    return TrainConfig(**values)


def normal_form(arguments: list[str]) -> list[str]:
    """With `_` for `-` inside option names, and the names after --compare as one list."""
    result, words = [], list(arguments)
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            word = "--" + name[2:].replace("-", "_") + equals + value
        result.append(word)
        if word == "--compare":
            names = []
            while words and not words[0].startswith("-"):
                names.append(words.pop(0))
            result.append(json.dumps(names))
    return result


def one_sentence(message: str) -> str:
    """jsonargparse's complaint in one line that says what would work."""
    key = re.search(r'Parser key "(\w+)"', message)
    value = re.search(r"(?:Got value|Given value): (.*)", message)
    if key and value and key[1] in HINTS:
        return f"{key[1]} {value[1]!r} is not {KINDS[HINTS[key[1]]]}"
    unknown = re.search(r"Option '([\w.]+)' is not accepted|unrecognized arguments: (\S+)", message)
    if unknown:
        name = (unknown[1] or unknown[2]).lstrip("-")
        near = ", ".join(difflib.get_close_matches(name, HINTS, n=3))
        return f"option {name!r} does not exist; {f'nearest: {near}' if near else '--help lists those that do'}"
    return f"{' '.join(message.split())}; --help lists what works"


KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    int | None: "a whole number",
    float | None: "a number",
    bool | None: "true or false",
    int | str: "a whole number or a word",
    str: "a word",
    str | None: "a word",
    list[str] | None: "a list of archs",
}


if __name__ == "__main__":
    sys.exit(main())
