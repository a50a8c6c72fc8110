"""What the documents say is still so."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_drawing_is_what_its_script_draws() -> None:
    draw = runpy.run_path(str(ROOT / "docs" / "draw_processes.py"))["draw"]
    assert (ROOT / "docs" / "processes.svg").read_text() == draw(), "run `make diagrams`"


def test_the_readme_names_every_command() -> None:
    from pengserve.cluster.cli.main import app

    readme = (ROOT / "README.md").read_text()
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        assert f"`pengserve {name}" in readme


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
