"""Hooks of MkDocs: links that leave docs/ work on the site as they do on a forge.

Files at the top level of the repository appear below project/, and links to them, and from them into docs/, are
rewritten when a page is read. A link to a directory leads to its README.md.
"""

from __future__ import annotations

import os.path
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
TOP_LEVEL = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "sample-config.toml")
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
_FENCE = re.compile(r"(^```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files of the top level."""
    for name in TOP_LEVEL:
        files.append(File.generated(config, f"project/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page, those in code blocks excepted."""
    return rewritten(markdown, page.file.src_uri)


def rewritten(markdown: str, uri: str) -> str:
    """The text of page `uri` with the site's links; a target that is not on the site is left for MkDocs to report."""
    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(_rewriter(uri), part) for part in parts[::2]]
    return "".join(parts)


def _rewriter(uri: str) -> Callable[[re.Match[str]], str]:
    source = uri.removeprefix("project/") if uri.startswith("project/") else f"docs/{uri}"

    def rewrite(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        if (ROOT / target / "README.md").is_file():
            target = f"{target}/README.md"
        if target in TOP_LEVEL:
            on_site = f"project/{target}"
        elif target.startswith("docs/"):
            on_site = target.removeprefix("docs/")
        else:
            return link[1]
        return os.path.relpath(on_site, posixpath.dirname(uri) or ".")

    return rewrite
