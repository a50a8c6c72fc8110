"""Whether the CUDA build of vLLM has each name that PengServe uses, with the same parameters as the CPU build.

    python -m tests.support.cuda_wheel vllm-0.32.0-....whl > docs/cuda-wheel.md

The wheel (`pip download vllm==0.32.0 --no-deps`) is read and not run: its sources are parsed, and so are those of the
vLLM that is installed here. Names are those that the packages import from vLLM, and the members that the two seams
list in `ATTRIBUTES`.
"""

import ast
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("replicas", "cluster", "controller", "planners", "simulator", "deploy")
SEAMS = ("replicas/engine/vllm_seam.py", "cluster/ingress/vllm_openai_seam.py")

Read = Callable[[str], str | None]
"""Source of a file by its path within site-packages; None where there is none."""


class Sources:
    """One build of vLLM."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.tree = cache(self._tree)

    def _tree(self, module: str) -> ast.Module | None:
        path = module.replace(".", "/")
        source = self._read(f"{path}.py") or self._read(f"{path}/__init__.py")
        return ast.parse(source) if source else None

    def find(self, module: str, name: str, depth: int = 8) -> tuple[str, ast.AST] | None:
        """Where `name` of a module is defined, and by what; through imports."""
        tree = self.tree(module)
        if tree is None or not depth:
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
                return module, node
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in [getattr(t, "id", None) for t in targets]:
                return module, node
            if isinstance(node, ast.ImportFrom):
                source = self._module_of(module, node)
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        found = self.find(source, alias.name, depth - 1)
                        return found or ((module, node) if self.tree(f"{source}.{alias.name}") else None)
        return (module, tree) if self.tree(f"{module}.{name}") else None

    def _module_of(self, module: str, node: ast.ImportFrom) -> str:
        """The module that an import within `module` names."""
        if not node.level:
            return node.module or ""
        is_package = self._read(f"{module.replace('.', '/')}/__init__.py") is not None
        package = module.split(".")
        package = package[: len(package) - node.level + is_package]
        return ".".join([*package, *([node.module] if node.module else [])])

    def member(self, module: str, owner: str, name: str) -> ast.AST | None:
        """A member of a class, its bases' included."""
        found = self.find(module, owner)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        home, node = found
        for part in node.body:
            names = [getattr(part, "name", None), getattr(getattr(part, "target", None), "id", None)]
            names += [getattr(target, "id", None) for target in getattr(part, "targets", ())]
            if name in names:
                return part
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        members = (self.member(home, base.id, name) for base in bases if isinstance(base, ast.Name))
        return next((member for member in members if member is not None), None)

    def parameters(self, module: str, name: str) -> str | None:
        """Of a function, or of a class's `__init__`, as text; empty for other things; None where it is missing."""
        found = self.find(module, name)
        if found is None:
            return None
        return _parameters(self.member(module, name, "__init__") if isinstance(found[1], ast.ClassDef) else found[1])


def _parameters(node: ast.AST | None) -> str:
    return ast.unparse(node.args) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""


def used_names() -> dict[str, str]:
    """`{name: module}` of what the packages import from vLLM."""
    used = {}
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                used |= {alias.name: node.module or "" for alias in node.names}
    return used


def used_members() -> Iterator[tuple[str, str]]:
    """(class, member) of what the seams list."""
    for seam in SEAMS:
        for node in ast.parse((ROOT / seam).read_text()).body:
            if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "ATTRIBUTES":
                assert isinstance(node.value, ast.Dict)
                for owner, members in zip(node.value.keys, node.value.values, strict=True):
                    yield from ((ast.unparse(owner), str(name)) for name in ast.literal_eval(members))  # type: ignore[arg-type]


def differences(installed: Sources, wheel: Sources) -> Iterator[tuple[str, str]]:
    """(name, what is wrong with it in the wheel; empty where nothing is)."""
    names = used_names()
    for name, module in sorted(names.items()):
        here, there = installed.parameters(module, name), wheel.parameters(module, name)
        yield f"{module}.{name}", "missing" if there is None else "" if here == there else f"({there}), here ({here})"
    for owner, name in used_members():
        module = names.get(owner, "")
        here_node, there_node = (build.member(module, owner, name) for build in (installed, wheel))
        here, there = _parameters(here_node), _parameters(there_node)
        wrong = "missing" if there_node is None and here_node is not None else ""
        yield f"{module}.{owner}.{name}", wrong or ("" if here == there else f"({there}), here ({here})")


def installed_sources() -> Sources:
    """Those of this environment's vLLM."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None, "vLLM is not installed here"
    site = Path(spec.origin).parents[1]
    return Sources(lambda path: (site / path).read_text() if (site / path).is_file() else None)


def wheel_sources(wheel: Path) -> Sources:
    """Those of a wheel."""
    archive = zipfile.ZipFile(wheel)
    files = set(archive.namelist())
    return Sources(lambda path: archive.read(path).decode() if path in files else None)


def main() -> int:
    wheel = Path(sys.argv[1])
    found = list(differences(installed_sources(), wheel_sources(wheel)))
    wrong = [(name, what) for name, what in found if what]
    print(f"# Names of vLLM in `{wheel.name}`\n")
    print("Written by `python -m tests.support.cuda_wheel`, which parses the wheel and does not run it.\n")
    print(f"PengServe uses {len(found)} names of vLLM. {len(found) - len(wrong)} are in the CUDA build with the")
    print(f"parameters that they have in the CPU build; {len(wrong)} are not.")
    if wrong:
        print("\n| name | in the wheel |\n|---|---|")
        print("\n".join(f"| `{name}` | {what} |" for name, what in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
