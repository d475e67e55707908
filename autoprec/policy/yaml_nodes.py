"""Reading YAML with the line of everything: a node tree is taken apart with checks that name file and line."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

import yaml

from autoprec.errors import PolicyError, PolicyFileError

T = TypeVar("T")

_TAG = "tag:yaml.org,2002:"
_KINDS = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "null": "nothing"}


@dataclass(frozen=True)
class Entry:
    """One node of a YAML file and the name of the file."""

    node: yaml.Node
    file: str

    @property
    def line(self) -> int:
        """Return the line the node starts at, counted from 1."""
        return int(self.node.start_mark.line) + 1

    def fail(self, message: str) -> NoReturn:
        """Raise `PolicyFileError` with the message after `file:line: `."""
        raise PolicyFileError(f"{self.file}:{self.line}: {message}")

    def build(self, make: Callable[[], T]) -> T:
        """Return what `make` returns; a `PolicyError` in it gets this entry's file and line."""
        try:
            return make()
        except PolicyFileError:
            raise
        except PolicyError as error:
            raise PolicyFileError(f"{self.file}:{self.line}: {error}") from error

    def mapping(self, what: str, allowed: Iterable[str] | None = None) -> "Mapping[str, Entry]":
        """Return the entries of a mapping; its keys are text, each there once, and of `allowed` where that is given."""
        if not isinstance(self.node, yaml.MappingNode):
            self.fail(f"{what} is {_described(self.node)}; expected a mapping (key: value)")
        entries: dict[str, Entry] = {}
        for key_node, value in self.node.value:
            key = Entry(key_node, self.file)
            name = key.text(f"a key of {what}")
            if name in entries:
                key.fail(f'{what} has the key "{name}" twice; delete one')
            if allowed is not None and name not in allowed:
                near = get_close_matches(name, allowed, n=1, cutoff=0.5)
                hint = f'; nearest: "{near[0]}"' if near else ""
                key.fail(f'{what} has no key "{name}"; keys: {", ".join(allowed)}{hint}')
            entries[name] = Entry(value, self.file)
        return entries

    def sequence(self, what: str) -> "tuple[Entry, ...]":
        """Return the entries of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            self.fail(f"{what} is {_described(self.node)}; expected a list (a line with - for each)")
        return tuple(Entry(node, self.file) for node in self.node.value)

    def scalar(self, what: str) -> Any:
        """Return text, a number, a boolean or None, as YAML reads the scalar."""
        node = self.node
        if not isinstance(node, yaml.ScalarNode) or _kind(node) not in _KINDS:
            self.fail(f"{what} is {_described(node)}; expected text or a number; text that looks like more is quoted")
        try:
            return yaml.constructor.SafeConstructor().construct_object(node)
        except (ValueError, yaml.YAMLError) as error:
            self.fail(f'{what} is "{node.value}", which cannot be read as {_KINDS[_kind(node)]}: {error}')

    def text(self, what: str) -> str:
        """Return text."""
        value = self.scalar(what)
        if not isinstance(value, str):
            self.fail(f"{what} is {_described(self.node)}; expected text; quote it if it is meant as text")
        return value

    def integer(self, what: str) -> int:
        """Return a whole number."""
        value = self.scalar(what)
        if type(value) is not int:
            self.fail(f"{what} is {_described(self.node)}; expected a whole number")
        return int(value)

    def number(self, what: str) -> float:
        """Return a number, whole or not."""
        value = self.scalar(what)
        if type(value) not in (int, float):
            self.fail(f"{what} is {_described(self.node)}; expected a number (1.0e-5, not 1e-5, which is text in YAML)")
        return float(value)

    def plain(self, what: str) -> Any:
        """Return nested mappings and lists of scalars."""
        if isinstance(self.node, yaml.MappingNode):
            return {key: entry.plain(f"{what}.{key}") for key, entry in self.mapping(what).items()}
        if isinstance(self.node, yaml.SequenceNode):
            return [entry.plain(f"{what}[{index}]") for index, entry in enumerate(self.sequence(what))]
        return self.scalar(what)


def compose(text: str, file: str) -> Entry:
    """Return the root entry of a YAML text.

    Raises: `PolicyFileError` if it is empty or not YAML.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise PolicyFileError(f"{file}{line}: not YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise PolicyFileError(f"{file}: not YAML: {error}") from error
    except RecursionError as error:
        raise PolicyFileError(f"{file}: nested too deep to be a policy") from error
    if node is None:
        raise PolicyFileError(f"{file}:1: the file is empty; a policy starts with autoprec: 1")
    return Entry(node, file)


def _kind(node: yaml.Node) -> str:
    return str(node.tag).removeprefix(_TAG)


def _described(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return f'{_KINDS.get(_kind(node), _kind(node))} ("{node.value}")'
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"
