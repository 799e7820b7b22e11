"""What the site has beside the files in docs/: README, CONTRIBUTING, SECURITY and the API pages.

README.md and the others are read where they lie, so that GitHub and the site show the same text.
Links are written for GitHub, relative to the file that they stand in. On the site a link to another
page leads to that page, one to a module of coatlm to its API page, and one to any other file of the
repository, which the site does not have, becomes plain text.

An API page is one line that mkdocstrings replaces by the docstrings of a module. It reads the
source, and neither torch nor megatron-core has to be installed.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {  # file of the repository -> page of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(?<!!)\[([^\]\[]*(?:\[[^\]]*\][^\]\[]*)*)\]\(([^)\s]+)\)")
PICTURE = re.compile(r"(!\[[^\]]*\]\()([^)\s:]+)(\))")
MARKED = re.compile(r"^(```\w+) (?:run|check)$", re.MULTILINE)  # for tests/guides.py
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def modules() -> list[Path]:
    """Public modules of the package, relative to the repository, in the order of their names."""
    found = sorted(path.relative_to(ROOT) for path in (ROOT / "coatlm").rglob("*.py"))
    return [path for path in found if path.stem == "__init__" or not path.stem.startswith("_")]


def api_page(module: Path) -> str:
    """The page of a module; a package's own page is the index of its directory."""
    if module.stem == "__init__":
        return f"api/{module.parent.as_posix()}/index.md"
    return f"api/{module.with_suffix('.md').as_posix()}"


def dotted(module: Path) -> str:
    name = module.parent if module.stem == "__init__" else module.with_suffix("")
    return name.as_posix().replace("/", ".")


def api_text(module: Path) -> str:
    """A package lists its modules, each with the first line of its docstring."""
    lines = [f"# {dotted(module)}", "", f"::: {dotted(module)}", ""]
    if module.stem == "__init__":
        lines += ["", *(f"- {entry}" for entry in contents(module.parent))]
    return "\n".join(lines) + "\n"


def contents(package: Path) -> Iterator[str]:
    """A line for each module and package directly in a package."""
    for module in modules():
        nested = module.stem == "__init__"
        if (module.parent.parent if nested else module.parent) == package:
            target = posixpath.relpath(api_page(module), f"api/{package.as_posix()}")
            purpose = ast.get_docstring(ast.parse((ROOT / module).read_text())) or ""
            yield f"[`{dotted(module)}`]({target}) {purpose.splitlines()[0] if purpose else ''}"


def api_nav() -> list[Any]:
    """coatlm's own modules, then a section for each package."""
    packages: dict[Path, list[Any]] = {}
    for module in modules():
        entries = packages.setdefault(module.parent, [])
        page = api_page(module)
        entries.insert(0, page) if module.stem == "__init__" else entries.append(
            {module.stem: page}
        )
    top = packages.pop(Path("coatlm"))
    return [*top, *({package.name: pages} for package, pages in packages.items())]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = [*(config.nav or []), {"API": api_nav()}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for module in modules():
        files.append(File.generated(config, api_page(module), content=api_text(module)))
    return files


def page_of(path: str) -> str | None:
    """The page or picture of the site that shows a file or folder of the repository."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("docs/"):
        inside = path.removeprefix("docs/")
        return f"{inside}/README.md" if (ROOT / path).is_dir() else inside
    for module in (Path(path), Path(path, "__init__.py")):
        if module.suffix == ".py" and module in modules():
            return api_page(module)
    return None


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    here = page.file.src_uri
    if here.startswith("api/"):
        return markdown
    sources = {shown: source for source, shown in OUTSIDE.items()}
    folder = posixpath.dirname(sources.get(here, f"docs/{here}"))

    def relative(shown: str) -> str:
        return posixpath.relpath(shown, posixpath.dirname(here) or ".")

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        target, hash, anchor = target.partition("#")
        if "://" in target or not target:
            return found[0]
        shown = page_of(posixpath.normpath(posixpath.join(folder, target)))
        if shown is None:
            return text
        return f"[{text}]({relative(shown)}{hash}{anchor})"

    def picture(found: re.Match[str]) -> str:
        shown = page_of(posixpath.normpath(posixpath.join(folder, found[2])))
        return (
            f"{found[1]}{posixpath.relpath(str(shown), posixpath.dirname(here) or '.')}{found[3]}"
        )

    parts = FENCED.split(MARKED.sub(r"\1", markdown))
    for i in range(0, len(parts), 2):  # the text between fenced blocks
        parts[i] = PICTURE.sub(picture, LINK.sub(link, parts[i]))
    return "".join(parts)
