"""The fenced code blocks of the documentation, and what is checked of each without running it.

An info string is a language and tags: ```` ```bash cpu slow ````.

- `cpu`: runs as it stands in a copy of deploy/ and recipes/, after the earlier ones of its document; with `slow` behind
  `make test-slow`.
- `over=FILE` on a yaml block that is part of a run file: the file it is merged into; default deploy/tiny_cpu.yaml.
- `text` is for output and drawings: nothing is checked.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml

from relax.cli.check import check
from relax.cli.main import app
from relax.config.file import apply_override, load_run_file, parse_run_file
from relax.config.sections import ROLES

ROOT = Path(__file__).parents[2]
LANGUAGES = ("bash", "python", "yaml", "json", "text")
TAGS = ("cpu", "slow")
OVER = "over="
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$")
_SEPARATORS = {"|", "||", "&", "&&", ";", "\n"}


class BadBlock(Exception):
    """What is wrong with a block; begins with file and line."""


@dataclass(frozen=True)
class Block:
    """`line`: of the opening fence, from 1."""

    path: Path
    line: int
    language: str
    tags: tuple[str, ...]
    text: str

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path}:{self.line}"

    @property
    def runs(self) -> bool:
        return "cpu" in self.tags

    def fault(self, words: str) -> BadBlock:
        return BadBlock(f"{self.place}: {words}")


def documents() -> list[Path]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").glob("*/README.md")]
    return sorted([*found, ROOT / "relax" / "cli" / "recipe_template" / "README.md"])


def blocks_of(path: Path) -> list[Block]:
    """Raises `BadBlock` for a fence that is never closed, a language or a tag that means nothing here."""
    found: list[Block] = []
    opened: tuple[str, Block] | None = None
    lines: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None and fence is not None:
            language, *tags = fence["info"].split() or [""]
            opened, lines = (fence["fence"], Block(path, number, language, tuple(tags), "")), []
        elif opened is not None and fence is not None and not fence["info"].strip() and fence["fence"] >= opened[0]:
            block = opened[1]
            found.append(_checked(Block(path, block.line, block.language, block.tags, "\n".join(lines) + "\n")))
            opened = None
        elif opened is not None:
            lines.append(line)
    if opened is not None:
        raise opened[1].fault("the block is never closed")
    return found


def _checked(block: Block) -> Block:
    if block.language not in LANGUAGES:
        raise block.fault(f"language '{block.language}' is not one of {', '.join(LANGUAGES)}: tag the block")
    for tag in block.tags:
        if tag not in TAGS and not (tag.startswith(OVER) and block.language == "yaml"):
            raise block.fault(f"unknown tag '{tag}'")
    if block.runs and block.language not in ("bash", "python"):
        raise block.fault(f"a {block.language} block cannot run")
    if "slow" in block.tags and not block.runs:
        raise block.fault("'slow' goes with 'cpu'")
    return block


def parse(block: Block) -> None:
    """Raises `BadBlock` with the place and what is wrong."""
    match block.language:
        case "bash":
            _parse_bash(block)
        case "python":
            try:
                ast.parse(block.text)
            except SyntaxError as error:
                raise block.fault(f"line {error.lineno} of the block: {error.msg}") from error
        case "yaml":
            _parse_yaml(block)
        case "json":
            try:
                json.loads(block.text)
            except ValueError as error:
                raise block.fault(str(error)) from error


# ---------------------------------------------------------------------- bash


def _parse_bash(block: Block) -> None:
    found = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=10)
    if found.returncode != 0 or found.stderr:
        raise block.fault(found.stderr.strip())
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(block.text):
        if words[0] == "relax":
            if (words_wrong := wrong_command(words[1:])) is not None:
                raise block.fault(f"`{shlex.join(words)}`: {words_wrong}")
        elif words[0] == "make":
            for target in words[1:]:
                if "=" not in target and not target.startswith("-") and target not in targets:
                    raise block.fault(f"`{shlex.join(words)}`: the Makefile has no target '{target}'")


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a script, as words; variable assignments in front are left out."""
    words: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split, lexer.commenters = True, "#"
        for token in [*lexer, "\n"]:
            if token not in _SEPARATORS:
                words.append(token)
                continue
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words.pop(0)
            if words:
                yield words
            words = []


def wrong_command(arguments: list[str]) -> str | None:
    """What the command line says to these arguments of `relax`; nothing is run."""
    command: Any = typer.main.get_command(app)
    path = "relax"
    while hasattr(command, "commands"):
        if not arguments or arguments[0] not in command.commands:
            return f"'{path}' has no command {arguments[0]!r}" if arguments else f"'{path}' alone does nothing"
        path, command, arguments = f"{path} {arguments[0]}", command.commands[arguments[0]], arguments[1:]
    try:
        command.make_context(path, list(arguments))
    except Exception as error:  # the parser's own errors share no public base over the versions of typer
        if type(error).__name__ == "Exit":  # --help
            return None
        return getattr(error, "message", None) or str(error) or type(error).__name__
    return None


_SPAN = re.compile(r"`(relax [^`]+)`")


def check_inline(path: Path) -> None:
    """Commands named in the text, between the blocks: they may lack arguments, and must exist with their options.

    Raises `BadBlock` with the place.
    """
    fenced = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if _FENCE.match(line):
            fenced = not fenced
        for span in [] if fenced else _SPAN.findall(line):
            wrong = _wrong_mention(shlex.split(span)[1:])
            if wrong is not None:
                raise Block(path, number, "text", (), "").fault(f"`{span}`: {wrong}")


def _wrong_mention(words: list[str]) -> str | None:
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            return f"no command '{words[0]}'"
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in getattr(command, "params", []) for option in parameter.opts}
    return next((f"no option '{word}'" for word in words if word.startswith("-") and word not in known), None)


# ---------------------------------------------------------------------- yaml


def _parse_yaml(block: Block) -> None:
    try:
        loaded = yaml.safe_load(block.text)
    except yaml.YAMLError as error:
        raise block.fault(f"not valid YAML: {error}") from error
    try:
        if isinstance(loaded, dict) and "applications" in loaded:
            check(parse_run_file(loaded, block.place), check_port=False)
        else:
            _check_fragment(block, loaded)
    except ValueError as error:
        raise block.fault(str(error)) from error


def _check_fragment(block: Block, loaded: Any) -> None:
    """Sections of a run file: each key that the fragment sets, set in a whole file."""
    if not isinstance(loaded, dict) or not set(loaded) <= {"run", *ROLES}:
        raise block.fault(f"not a run file, and not sections of one ({', '.join(['run', *ROLES])})")
    over = next((tag.removeprefix(OVER) for tag in block.tags if tag.startswith(OVER)), "deploy/tiny_cpu.yaml")
    document = load_run_file(ROOT / over).serve
    for section, values in loaded.items():
        for path, value in _leaves(values, section):
            apply_override(document, f"{path}={json.dumps(value)}")
    parse_run_file(document, block.place)


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """A mapping with a `kind` or a `name` replaces what was there: its other keys belong to that kind."""
    if isinstance(node, dict) and not {"kind", "name"} & set(node):
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}")
    else:
        yield path, node
