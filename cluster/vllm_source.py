"""What the installed vLLM accepts, read from its source: importing vLLM costs about eight seconds of CPU time.

    argument_names()          names of the engine arguments
    argument_problem(n, v)    what is wrong with a value of one of them
    tool_parsers()            names that openai.tool_call_parser may have
    reasoning_parsers()       names that openai.reasoning_parser may have

The source is parsed, never executed. What cannot be found or understood is None, or a check that accepts everything:
a setting is refused only where the source says plainly that vLLM refuses it. `tests/cluster/test_vllm_source.py`
compares the result with the imported vLLM, so that an upgrade which moves something fails there.
"""

import ast
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

ARGUMENTS_MODULE, ARGUMENTS_CLASSES = "vllm.engine.arg_utils", ("EngineArgs", "AsyncEngineArgs")
TOOL_PARSERS = ("vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER")
REASONING_PARSERS = ("vllm.reasoning", "_REASONING_PARSERS_TO_REGISTER")
PLUGIN_GROUP = "vllm.general_plugins"

_SIMPLE: Mapping[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "None": None}
_COLLECTIONS: Mapping[str, Any] = {"list": list, "set": set, "tuple": tuple, "dict": dict}
_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
_COLLECTION_WORDS = {list: "a list", set: "a list", tuple: "a list", dict: "keys with values"}
_BOUNDS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": ("at least", lambda value, bound: value >= bound),
    "gt": ("more than", lambda value, bound: value > bound),
    "le": ("at most", lambda value, bound: value <= bound),
    "lt": ("less than", lambda value, bound: value < bound),
}
_MAX_DEPTH = 8  # aliases of aliases; more is a cycle
_UNREADABLE = (OSError, SyntaxError, LookupError, ValueError, TypeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgument:
    """One engine argument: the type of its value, Any where the source does not tell, and its bounds."""

    type: Any = Any
    bounds: Mapping[str, float]

    def problem(self, value: Any) -> str:
        """What is wrong with `value`, as "... is expected, got ..."; empty where vLLM may accept it."""
        if value is None or self.type is Any:
            return ""
        try:
            read = TypeAdapter(self.type).validate_python(value)
        except ValidationError:
            return f"{_describe(self.type)} is expected, got {value!r}"
        if isinstance(read, bool) or not isinstance(read, int | float):
            return ""
        broken = [
            f"{_BOUNDS[name][0]} {bound:g}" for name, bound in self.bounds.items() if not _holds(name, read, bound)
        ]
        return f"{' and '.join(broken)} is expected, got {value!r}" if broken else ""


def argument_names() -> frozenset[str] | None:
    """Names of all engine arguments. None where vLLM's source cannot be read."""
    try:
        return frozenset(_argument_fields())
    except _UNREADABLE:
        return None


def argument_problem(name: str, value: Any) -> str:
    """What is wrong with the value of an engine argument; empty where vLLM may accept it, or the name is unknown."""
    try:
        return engine_argument(name).problem(value)
    except _UNREADABLE:
        return ""


@cache
def engine_argument(name: str) -> EngineArgument:
    """How the value of one engine argument is checked.

    Raises:
        LookupError: there is no such argument.
    """
    module, node = _module(ARGUMENTS_MODULE), _argument_fields()[name]
    return EngineArgument(type=_type(node.annotation, module), bounds=_bounds(name, node.value, module))


def tool_parsers() -> frozenset[str] | None:
    """Names of tool parsers. None where they cannot be known."""
    return _parsers(*TOOL_PARSERS)


def reasoning_parsers() -> frozenset[str] | None:
    """Names of reasoning parsers. None where they cannot be known."""
    return _parsers(*REASONING_PARSERS)


class _Module:
    """The top level of one module of vLLM: what its names stand for."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.imports: dict[str, tuple[str, str]] = {}  # local name -> (module, name there)
        self.values: dict[str, ast.expr] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        is_package = path.name == "__init__.py"
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                source = self._absolute(node, is_package)
                self.imports |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, ast.Assign):
                self.values |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self.values[node.target.id] = node.value

    def _absolute(self, node: ast.ImportFrom, is_package: bool) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parent = parts[: len(parts) - node.level + is_package]
        return ".".join([*parent, *([node.module] if node.module else [])])


@cache
def _module(name: str) -> _Module:
    # `find_spec` of a top-level name finds the package without importing it.
    package, *rest = name.split(".")
    spec = importlib.util.find_spec(package) if package == "vllm" else None
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"no source of {name}")
    path = Path(next(iter(spec.submodule_search_locations))).joinpath(*rest)
    return _Module(name, path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


def _find(name: str, module: _Module, depth: int = 0) -> tuple[_Module, ast.expr | ast.ClassDef]:
    """What `name` stands for in `module`, and where that is defined; follows imports inside vLLM."""
    found = module.classes.get(name) or module.values.get(name)
    if found is not None:
        return module, found
    source, original = module.imports[name]
    if depth > _MAX_DEPTH or source.partition(".")[0] != "vllm":
        raise LookupError(name)
    return _find(original, _module(source), depth + 1)


@cache
def _argument_fields() -> Mapping[str, ast.AnnAssign]:
    module = _module(ARGUMENTS_MODULE)
    return dict(field for name in ARGUMENTS_CLASSES for field in _fields(module.classes[name]))


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
    """Fields of a dataclass."""
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        annotation = item.annotation.value if isinstance(item.annotation, ast.Subscript) else item.annotation
        if not (isinstance(annotation, ast.Name) and annotation.id in ("ClassVar", "InitVar")):
            yield item.target.id, item


def _type(node: ast.expr, module: _Module, depth: int = 0) -> Any:
    """The Python type that an annotation stands for; Any for each part that is more than plain data."""
    if depth > _MAX_DEPTH:
        return Any
    if isinstance(node, ast.Constant):
        if node.value is None:
            return None
        return _type(ast.parse(node.value, mode="eval").body, module, depth + 1) if isinstance(node.value, str) else Any
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union(_type(node.left, module, depth + 1), _type(node.right, module, depth + 1))
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return _generic(node.value.id, node.slice, module, depth)
    if isinstance(node, ast.Name):
        return _named(node.id, module, depth)
    return Any


def _named(name: str, module: _Module, depth: int) -> Any:
    for known in (_SIMPLE, _COLLECTIONS):
        if name in known:
            return known[name]
    try:
        where, found = _find(name, module)
    except _UNREADABLE:
        return Any
    return Any if isinstance(found, ast.ClassDef) else _type(found, where, depth + 1)


def _generic(name: str, inner: ast.expr, module: _Module, depth: int) -> Any:
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if name == "Literal":
        values = [_literal_values(part, module, depth) for part in parts]
        return Any if None in values else Literal[tuple(value for some in values for value in some or ())]
    if name == "Annotated":
        return _type(parts[0], module, depth + 1)
    types = [_type(part, module, depth + 1) for part in parts]
    if name == "Optional":
        return _union(types[0], None)
    if name == "Union":
        return _union(*types)
    if name in ("list", "set") and len(types) == 1:
        return _COLLECTIONS[name][types[0]]
    if name == "dict" and len(types) == 2:
        return dict[types[0], types[1]]  # type: ignore[valid-type]
    return _COLLECTIONS.get(name, Any)


def _literal_values(part: ast.expr, module: _Module, depth: int) -> tuple[Any, ...] | None:
    """What a part of `Literal[...]` allows; None where that is not plain. A part may be the name of another Literal."""
    if isinstance(part, ast.Constant):
        return (part.value,)
    kind = _type(part, module, depth + 1)
    return kind.__args__ if getattr(kind, "__origin__", None) is Literal else None


def _union(*types: Any) -> Any:
    return Any if any(part is Any for part in types) else Union[types]  # noqa: UP007  the parts are known at run time alone


def _bounds(name: str, default: ast.expr | None, module: _Module) -> dict[str, float]:
    """Bounds of a number: those of the field of a configuration class that the argument becomes."""
    for owner, field in _becomes(name, default):
        try:
            _, found = _find(owner, module)
        except _UNREADABLE:
            continue
        if isinstance(found, ast.ClassDef):
            value = next((node.value for other, node in _fields(found) if other == field), None)
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Field":
                return dict(_literal_bounds(value))
    return {}


def _becomes(name: str, default: ast.expr | None) -> Iterator[tuple[str, str]]:
    """Where an argument may go, as (class, field). Most take their default from there."""
    if isinstance(default, ast.Attribute) and isinstance(default.value, ast.Name):
        yield default.value.id, default.attr
    elif isinstance(default, ast.Call) and len(default.args) == 2:
        owner, field = default.args
        if isinstance(owner, ast.Name) and isinstance(field, ast.Constant):
            yield owner.id, str(field.value)
    elif isinstance(default, ast.Constant) and default.value is None:
        yield from ((owner, name) for owner in ("SchedulerConfig", "CacheConfig"))


def _literal_bounds(field: ast.Call) -> Iterator[tuple[str, float]]:
    for keyword in field.keywords:
        if keyword.arg is not None and keyword.arg in _BOUNDS:
            try:
                bound = ast.literal_eval(keyword.value)
            except ValueError:
                continue  # a name: vLLM itself compares with what it stands for
            if isinstance(bound, int | float):
                yield keyword.arg, bound


def _holds(name: str, value: float, bound: float) -> bool:
    return _BOUNDS[name][1](value, bound)


def _describe(kind: Any) -> str:
    """A type in words, for a message: `int | None` is "a whole number"."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Union:
        return " or ".join(dict.fromkeys(_describe(part) for part in parts if part is not type(None)))
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}" if len(parts) > 1 else str(parts[0])
    return _WORDS.get(kind) or _COLLECTION_WORDS[origin or kind]


@cache
def _parsers(module: str, table: str) -> frozenset[str] | None:
    if any(not point.value.startswith("vllm.") for point in importlib.metadata.entry_points(group=PLUGIN_GROUP)):
        return None  # code of a plugin may register more of them
    try:
        found = _module(module).values[table]
    except _UNREADABLE:
        return None
    if not isinstance(found, ast.Dict):
        return None
    names = frozenset(key.value for key in found.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
    return names or None
