"""What `pyproject.toml` cannot say: links for the index page, and archives that two builds make equal, byte for byte.

The index page shows the README outside of the repository, so its relative links and pictures become absolute ones, to
the files of this version. Times, owners and modes of files do not get into the archives: every file is from
SOURCE_DATE_EPOCH (1980, if that is not set), and whoever may execute it is everybody or nobody.
"""

from __future__ import annotations

import gzip
import os
import posixpath
import re
import tarfile
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_FENCE = re.compile(r"(^```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)([^)\s#]+)")
_EPOCH = os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")  # the first moment that a zip file can name


def index_page(markdown: str) -> str:
    """A page at the top of the repository, with absolute links to the files of this version; code stays as it is."""
    repository, tag = PROJECT["urls"]["Source"], f"v{PROJECT['version']}"

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        kind = "raw" if picture else "tree" if target.endswith("/") else "blob"
        return f"{picture}{text}{repository}/{kind}/{tag}/{posixpath.normpath(target)}"

    parts = _FENCE.split(markdown)
    # Twice: the text of a link may be a picture.
    parts[::2] = [_LINK.sub(absolute, _LINK.sub(absolute, part)) for part in parts[::2]]
    return "".join(parts)


def _mode(mode: int) -> int:
    return 0o755 if mode & 0o100 else 0o644


class Sdist(sdist):
    """Packs the archive itself: tarfile and gzip would write times, owners and the order of the file system into it."""

    def make_archive(
        self,
        base_name: str,
        format: str,  # noqa: A002 - the name is setuptools'
        root_dir: str | None = None,
        base_dir: str | None = None,
        owner: str | None = None,
        group: str | None = None,
    ) -> str:
        if format != "gztar" or root_dir is not None or base_dir is None:
            raise ValueError(f"only a gztar is reproducible, not {format}")
        path = Path(f"{base_name}.tar.gz")
        with (
            path.open("wb") as raw,
            gzip.GzipFile("", "wb", mtime=int(_EPOCH), fileobj=raw) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for file in sorted(Path(base_dir).rglob("*")):
                if file.is_dir():
                    continue
                entry = archive.gettarinfo(file)
                entry.uid = entry.gid = 0
                entry.uname = entry.gname = ""
                entry.mtime, entry.mode = int(_EPOCH), _mode(entry.mode)
                # Hard links to the sources, which setuptools makes where it can.
                entry.type, entry.linkname = tarfile.REGTYPE, ""
                entry.size = file.stat().st_size
                with file.open("rb") as content:
                    archive.addfile(entry, content)
        return str(path)


class Wheel(bdist_wheel):
    """Files have one of two modes, whatever the umask of whoever checked them out."""

    def write_wheelfile(self, wheelfile_base: str, *args: str, **options: str) -> None:
        super().write_wheelfile(wheelfile_base, *args, **options)
        for file in Path(wheelfile_base).parent.rglob("*"):
            if file.is_file():
                file.chmod(_mode(file.stat().st_mode))


setup(
    long_description=index_page((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    cmdclass={"sdist": Sdist, "bdist_wheel": Wheel},
)
