"""Ten small texts from Debian's packages, for the rule of --minutes: python make_texts.py FOLDER

Downloads these versions by apt-get (Debian 12), unpacks them, and joins the files of a pattern, sorted by path,
into FOLDER/tune or FOLDER/confirm/NAME.txt. Ends with an error if a text's SHA-256 differs.
"""

import glob
import gzip
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

# half, name, kind, package, version, patterns of files, SHA-256 of the text
TEXTS = [
    ("tune", "jargon", "prose", "jargon", "4.0.0-5.3", ["usr/share/info/jargon.info.gz"], ""),
    ("tune", "czech", "language", "fortunes-cs", "2.0.9-1.1", ["usr/share/games/fortunes/cs/*"], ""),
    ("tune", "jquery", "code", "libjs-jquery-ui", "1.13.2+dfsg-1", ["usr/share/javascript/jquery-ui/jquery-ui.js"], ""),
    ("tune", "policy", "markup", "debian-policy", "4.6.2.0", ["usr/share/doc/debian-policy/policy.html/*.html", "usr/share/doc/debian-policy/fhs/*.html"], ""),
    ("tune", "verse", "verse", "fortunes", "1:1.99.1-7.3", ["usr/share/games/fortunes/songs-poems"], ""),
    ("confirm", "sayings", "prose", "fortunes", "1:1.99.1-7.3", ["usr/share/games/fortunes/[cdp][oe][okmf]*"], ""),
    ("confirm", "russian", "language", "fortunes-ru", "1.52-3.1", ["usr/share/games/fortunes/ru/[a-l]*"], ""),
    ("confirm", "php", "code", "php-symfony-console", "5.4.53+dfsg-0+deb12u1", ["usr/share/php/**/*.php"], ""),
    ("confirm", "mime", "markup", "shared-mime-info", "2.2-1", ["usr/share/mime/packages/freedesktop.org.xml"], ""),
    ("confirm", "usb", "tables", "usb.ids", "2025.07.26-0+deb12u1", ["var/lib/usbutils/usb.ids"], ""),
]


def main(folder: Path) -> None:
    for half, name, kind, package, version, patterns, sha256 in TEXTS:
        with tempfile.TemporaryDirectory() as work:
            command = ["apt-get", "download", f"{package}={version}"]
            subprocess.run(command, cwd=work, check=True, capture_output=True)
            (deb,) = Path(work).glob("*.deb")
            subprocess.run(["dpkg", "-x", deb, work], check=True)
            parts = []
            for pattern in patterns:
                for path in sorted(glob.glob(f"{work}/{pattern}", recursive=True)):
                    if not Path(path).is_file() or path.endswith((".dat", ".u8")):
                        continue
                    data = Path(path).read_bytes()
                    parts.append(gzip.decompress(data) if path.endswith(".gz") else data)
        text = b"".join(parts).decode("utf-8", errors="replace").replace("\0", "").encode()
        found = hashlib.sha256(text).hexdigest()
        if sha256 and found != sha256:
            sys.exit(f"{name}: SHA-256 {found}, expected {sha256}")
        out = folder / half / f"{name}.txt"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(text)
        print(f"{half:8} {name:8} {kind:9} {len(text):9,} bytes  {len(parts)} files {found}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
