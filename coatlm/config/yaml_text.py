"""The YAML subset of configuration files.

It is YAML 1.1 as PyYAML's safe loader reads it, except that

    3e-4                 is a number; PyYAML requires a decimal point before the exponent
    010, 1:30, 2026-1-1  are strings, which numeric keys refuse; YAML 1.1 reads 8, 90 and a date
    duplicate keys       are errors; in PyYAML the last one wins
    aliases              may expand to at most 2^20 characters

`${...}` is ordinary text: neither environment variables nor other keys are substituted.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from coatlm.config.errors import shown

MOST_CHARACTERS = 2**18  # in a file or an override
MOST_EXPANDED = 2**20  # characters after every alias is expanded

_STANDARD = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0b[01][01_]*|0x[0-9a-fA-F][0-9a-fA-F_]*)\Z")
_FLOAT = re.compile(
    r"""(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?
         |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
         |[-+]?\.(?:inf|Inf|INF)
         |\.(?:nan|NaN|NAN))\Z""",
    re.VERBOSE,
)


class _YamlLoader(yaml.SafeLoader):
    """Reads YAML with its own table of how plain scalars get their types."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's interface)
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _STANDARD]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node. Raises MarkedYAMLError also where PyYAML lets an error of its own
        code through, as for `!!bool abc`.
        """
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:
            reason = f": {error}" if isinstance(error, ValueError) else ""
            kind = node.tag.rpartition(":")[2]
            what = f"{shown(node.value)} cannot be read as !!{kind}{reason}"
            raise yaml.MarkedYAMLError(None, None, what, node.start_mark) from None


class _YamlDumper(yaml.SafeDumper):
    """Writes YAML; quotes strings that `_YamlLoader` or YAML 1.1 would read as another type."""


for _class in (_YamlLoader, _YamlDumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:int", _INTEGER, list("-+0123456789"))
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse_yaml(text: str) -> Any:
    """Parse one YAML document. Raises ValueError with one line, which has the number of the line in
    `text` where that is known.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"longer than {MOST_CHARACTERS} characters")
    try:
        loader = _YamlLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded(node, {}) > MOST_EXPANDED:
            raise ValueError(f"its aliases expand to more than {MOST_EXPANDED} characters")
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"not valid YAML: {where}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError("not valid YAML: nested too deeply") from None


def _expanded(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Characters of a node after its aliases are expanded; infinite if it contains itself.

    Raises MarkedYAMLError for a mapping with a key given twice.
    """
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = float("inf")  # while its children are counted
    size = 1.0 + len(node.value)
    if isinstance(node, yaml.SequenceNode):
        size += sum(_expanded(child, sizes) for child in node.value)
    elif isinstance(node, yaml.MappingNode):
        size += sum(_expanded(child, sizes) for pair in node.value for child in pair)
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                raise yaml.MarkedYAMLError(None, None, f"duplicate key {key.value}", key.start_mark)
            names.add(str(key.value))
    sizes[id(node)] = size
    return size


def has_comment(text: str) -> bool:
    """Whether a valid YAML text contains a comment, which ` #` starts outside of quotes."""
    end = 0
    for token in yaml.scan(text, Loader=_YamlLoader):
        if "#" in text[end : token.start_mark.index]:
            return True
        end = token.end_mark.index
    return False


def dump_yaml(data: Any) -> str:
    """Write `data` as YAML that `parse_yaml` reads back."""
    return yaml.dump(data, Dumper=_YamlDumper, allow_unicode=True, sort_keys=False)
