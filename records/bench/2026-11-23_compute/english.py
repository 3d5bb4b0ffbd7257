"""The text of the packages in packages.txt: `python english.py FOLDER [PACKAGE ...]`, on Debian 12 with its sources.

Downloads each package (apt-get), takes its Sphinx sources, POD and help files, and writes one .txt each: of 1.5 kB to
1 MB, not translated, mostly lower-case ASCII letters, each text once.
"""

import gzip
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

WANTED = ["*_sources/*.txt", "*_sources/*.rst", "*_sources/*.md", "*_sources/*.txt.gz", "*_sources/*.rst.gz"]
WANTED += ["*_sources/*.md.gz", "*.pod", "*/vim90/doc/*.txt", "*/doc/git/*.txt"]
LANGUAGES = r"translations|/locale|libdatetime-locale|/(zh|ja|fr|de|es|it|ru|ko|pt)(_[A-Z]+)?/"


def unpack(package: str, folder: Path) -> None:
    """Download a package into folder, and unpack what is wanted of it."""
    subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (file,) = folder.glob("*.deb")
    content = subprocess.run(["dpkg-deb", "--fsys-tarfile", file.name], cwd=folder, check=True, capture_output=True)
    # tar says 2 where a pattern fits nothing.
    subprocess.run(["tar", "-x", "--wildcards", *WANTED], cwd=folder, input=content.stdout, stderr=subprocess.DEVNULL)


def text_of(path: Path) -> str | None:
    """The file's text, or None for what is not English prose of a fitting size."""
    content = path.read_bytes()
    try:
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError):
        return None
    fits = 1500 <= len(text.encode()) <= 1_000_000 and sum(c.isascii() for c in text) >= 0.97 * len(text)
    return text if fits and sum(c.islower() for c in text) >= 0.5 * len(text) else None


if __name__ == "__main__":
    out, seen = Path(sys.argv[1]), set()
    out.mkdir(parents=True)
    for package in sys.argv[2:] or Path(__file__).with_name("packages.txt").read_text().split():
        with tempfile.TemporaryDirectory() as folder:
            unpack(package, Path(folder))
            for path in sorted(Path(folder).rglob("*")):
                name = f"{package}/{path.relative_to(folder).as_posix()}"
                if not path.is_file() or re.search(LANGUAGES, f"/{name}") or (text := text_of(path)) is None:
                    continue
                key = hashlib.sha256(re.sub(r"[\W\d]+", "", text)[:3000].encode()).digest()
                if key not in seen:
                    seen.add(key)
                    short = re.sub(r"[^\w.-]+", "_", name).replace("usr_share_doc_", "")[-180:]
                    (out / f"{short}.txt").write_text(text)
