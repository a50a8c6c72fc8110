"""What the documents say is still so."""

import ast
import importlib.metadata
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pengserve.client import errors as client_errors
from pengserve.cluster.settings import LimitSettings
from pengserve.dashboards.alerts import ALERTS
from pengserve.planners.types import errors as library_errors
from pengserve.planners.types.events import EventKind
from tests.support.words import FORBIDDEN

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "dashboards")),
    *sorted((ROOT / "benchmarks" / "notes").glob("*.md")),
]
MOST_WORDS = {"README.md": 1250} | {path.name: 1000 for path in (ROOT / "docs" / "decisions").glob("*.md")}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in links(document.read_text()):
        path, _, anchor = target.partition("#")
        there = document.parent / path if path else document
        assert there.exists(), f"{document.name} links to {target}"
        if anchor:
            assert anchor in set(anchors(there.read_text())), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_name_their_subject(document: Path) -> None:
    text = document.read_text().lower()
    assert [word for word in FORBIDDEN if re.search(rf"\b{word}\b", text)] == []


@pytest.mark.parametrize(("name", "most"), MOST_WORDS.items())
def test_what_everyone_reads_is_short(name: str, most: int) -> None:
    (document,) = [path for path in DOCUMENTS if path.name == name and path.parent.name in (ROOT.name, "decisions")]
    assert len(document.read_text().split()) <= most


def test_every_decision_has_its_three_parts() -> None:
    for path in (ROOT / "docs" / "decisions").glob("*.md"):
        lines = path.read_text().splitlines()
        assert lines[0].startswith(f"# {path.name[:4]}: "), path.name
        headings = [line for line in lines if line.startswith("## ")]
        ends = ["## Context", "## Decision", "## Consequences"]
        assert [heading for heading in headings if heading in ends] == ends, f"{path.name}: {headings}"


def test_every_note_is_linked_from_a_decision_or_the_readme() -> None:
    readers = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    linked = {(path.parent / link.split("#")[0]).resolve() for path in readers for link in links(path.read_text())}
    assert [note.name for note in (ROOT / "benchmarks" / "notes").glob("*.md") if note.resolve() not in linked] == []


def test_the_drawing_is_what_its_script_draws() -> None:
    draw = runpy.run_path(str(ROOT / "docs" / "draw_processes.py"))["draw"]
    assert (ROOT / "docs" / "processes.svg").read_text() == draw(), "run `make diagrams`"


def test_the_support_matrix_is_what_the_tests_run() -> None:
    draw = runpy.run_path(str(ROOT / "docs" / "draw_support.py"))["draw"]
    assert (ROOT / "docs" / "support.md").read_text() == draw(), "run `make support`"


def test_the_readme_names_every_command() -> None:
    from pengserve.cluster.cli.main import app

    readme = (ROOT / "README.md").read_text()
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        assert f"`pengserve {name}" in readme


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_exist(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", document.read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_operators_read_of_every_kind_of_event_once() -> None:
    assert sorted(first_cells("docs/operators.md", "## Events")) == sorted(kind.value for kind in EventKind)


def test_operators_read_of_every_limit() -> None:
    fields = [cell for cell in first_cells("docs/operators.md", "## Limits") if re.fullmatch(r"\w+", cell)]
    assert sorted(fields) == sorted(LimitSettings.model_fields)


def test_operators_read_of_every_alert_as_it_is() -> None:
    assert sorted(first_cells("docs/operators.md", "## Alerts")) == sorted(alert.name for alert in ALERTS)
    handbook = (ROOT / "docs" / "operators.md").read_text()
    assert [alert.name for alert in ALERTS if f"`{alert.promql}`" not in handbook or alert.text not in handbook] == []


def test_every_error_class_is_explained_once() -> None:
    classes = [
        value.__name__
        for module in (library_errors, client_errors)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == module.__name__
    ]
    assert sorted(first_cells("docs/errors.md", "## In Python")) == sorted(classes)
    tree = (ROOT / "docs" / "errors.md").read_text().split("```")[1]
    assert sorted(re.findall(r"\w+Error", tree)) == sorted(classes)


def test_every_status_and_type_of_the_http_errors_is_explained_once() -> None:
    """The table is read from the source: importing the ingress would import vLLM."""
    tree = ast.parse((ROOT / "cluster" / "ingress" / "errors.py").read_text())
    (types,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["_TYPES"]
    ]
    rows = [row for row in table_rows("docs/errors.md", "## Over HTTP") if row[0].isdecimal()]
    said = {int(row[0]): row[1].strip("`") for row in rows}
    assert len(rows) == len(said) and said == types | {500: "InternalServerError"}


def test_issue_forms_are_forms() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.stem != "config":
            assert form["name"] and form["description"]
            assert {part["type"] for part in form["body"]} <= {
                "textarea",
                "input",
                "dropdown",
                "markdown",
                "checkboxes",
            }


def test_every_locked_part_under_a_gnu_licence_has_its_notice() -> None:
    notices = (ROOT / "docs" / "third-party.md").read_text()
    locked = re.findall(r"^([\w.-]+)==", (ROOT / "requirements-cpu.txt").read_text(), re.MULTILINE)
    gnu = []
    for package in map(importlib.metadata.distribution, locked):
        fields = [package.metadata.get("License-Expression", ""), package.metadata.get("License", "")]
        licence = " ".join([*(field[:80] for field in fields), *package.metadata.get_all("Classifier", [])])
        if re.search(r"\bA?L?GPL|GNU ", licence):
            gnu.append(package.name)
    assert gnu, "the lock has packages under such licences"
    assert [name for name in gnu if f"`{name}`" not in notices] == []


def links(text: str) -> Iterator[str]:
    """Targets in this repository."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r"^\[[^\]]+\]: (\S+)", prose, re.MULTILINE):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(text: str) -> Iterator[str]:
    """Of the headings, as GitHub makes them."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for heading in re.findall(r"^#+ (.+)$", prose, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def table_rows(document: str, heading: str) -> list[list[str]]:
    """Cells of the tables below a heading, without their own headings."""
    _, _, rest = (ROOT / document).read_text().partition(f"\n{heading}\n")
    assert rest, f"{document} has no {heading}"
    lines = re.sub(r"```.*?```", "", re.split(r"\n## ", rest)[0], flags=re.DOTALL).splitlines()
    is_body = [line.startswith("|") and i > 0 and lines[i - 1].startswith("|") for i, line in enumerate(lines)]
    rows = [line for line, inside in zip(lines, is_body, strict=True) if inside and not line.startswith("|--")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def first_cells(document: str, heading: str) -> list[str]:
    """The first cell of each row of those tables, without backticks."""
    return [row[0].replace("`", "") for row in table_rows(document, heading)]
