"""English of the proxy: text of Debian's manuals, and at most 3.2 MB of each package.

mkdir deb && (cd deb && for p in $(cut -d_ -f1 ../packages.txt); do apt-get download $p; done)
python english.py deb english    # then: data/prepare.py files english --tokenizer bpe ...
"""

import gzip
import html.parser
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCKS = set("p div li tr br h1 h2 h3 h4 h5 h6 pre dt dd table ul ol section".split())
SKIPPED = ("script", "style", "head", "nav", "footer")
LANGUAGES = (
    "de|fr|es|it|ja|ru|pt_BR|zh|ko|ca|nl|hu|cs|pl|sv|tr|da|zh_CN|zh-CN|uk|el|fi|hr|lt|nb|nn|ro|sk|"
    "sl|vi|ar|fa|id"
)


class Text(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.parts = []
        self.skipping = 0

    def handle_starttag(self, tag, attrs):
        self.skipping += tag in SKIPPED
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag):
        if tag in SKIPPED:
            self.skipping = max(0, self.skipping - 1)
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data):
        if not self.skipping:
            self.parts.append(data)


def text_of(path: Path) -> str | None:
    """A manual's text, or None for other files and languages."""
    name = path.name.removesuffix(".gz")
    if not re.search(r"\.(html?|txt|pod|rst|adoc|md|[1-9])$", name):
        return None
    if re.search(rf"/({LANGUAGES})[-/_.]", str(path)):
        return None
    data = path.read_bytes()
    if path.name.endswith(".gz"):
        try:
            data = gzip.decompress(data)
        except OSError:
            return None
    text = data.decode("utf-8", "replace")
    if re.search(r"\.html?$", name):
        parser = Text()
        parser.feed(text)
        text = "".join(parser.parts)
    elif re.search(r"\.[1-9]$", name):
        text = re.sub(r'^\.\\".*\n', "", text, flags=re.M)
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    if len(text) < 400 or sum(c > "\u024f" for c in text) > len(text) * 0.05:
        return None
    return text + "\n"


def main(debs: str, out: str) -> None:
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for deb in sorted(Path(debs).glob("*.deb")):
        package = deb.name.split("_")[0]
        texts = {}
        with tempfile.TemporaryDirectory() as unpacked:
            subprocess.run(["dpkg-deb", "-x", deb, unpacked], check=True)
            for path in sorted(Path(unpacked).rglob("*")):
                text = None
                if path.is_file() and not path.is_symlink():
                    text = text_of(path)
                if text and len(text) < 2e6:
                    name = str(path.relative_to(unpacked)).replace("/", "_")[-120:]
                    texts[f"{package}__{name}.txt"] = text
        names = sorted(texts)
        random.Random(0).shuffle(names)
        size = 0
        for name in names:
            if size > 3.2e6:
                break
            (folder / name).write_text(texts[name])
            size += len(texts[name])
        print(package, size, flush=True)


main(*sys.argv[1:])
