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
    ("tune", "jargon", "prose", "jargon", "4.0.0-5.3", ["usr/share/info/jargon.info.gz"], "5ae4bc4331f027610186e18cdfa50525202006433890d90391a2d306404e2c93"),
    ("tune", "czech", "language", "fortunes-cs", "2.0.9-1.1", ["usr/share/games/fortunes/cs/*"], "f872f46795d01d073decbb551897f14553c3a027791ed7bc2c4d4b473309a05b"),
    ("tune", "jquery", "code", "libjs-jquery-ui", "1.13.2+dfsg-1", ["usr/share/javascript/jquery-ui/jquery-ui.js"], "f0079e1c0b1bbc74fc18d6f34861a82fa1003da79ae9cf0946502cec95d6a028"),
    ("tune", "policy", "markup", "debian-policy", "4.6.2.0", ["usr/share/doc/debian-policy/policy.html/*.html", "usr/share/doc/debian-policy/fhs/*.html"], "986378951f91d98457a28096367455a2d02b596f7b5459cedb3a527b62dabadb"),
    ("tune", "verse", "verse", "fortunes", "1:1.99.1-7.3", ["usr/share/games/fortunes/songs-poems"], "eb714d297b468da91b6ca32baefb000279a3e3740b09f8a87db24fe58e010b1a"),
    ("confirm", "sayings", "prose", "fortunes", "1:1.99.1-7.3", ["usr/share/games/fortunes/[cdp][oe][okmf]*"], "f91003389385389e2acc80e72734b068b997b7732e4572b3303aaf1eb290944d"),
    ("confirm", "russian", "language", "fortunes-ru", "1.52-3.1", ["usr/share/games/fortunes/ru/[a-l]*"], "30ab6e0fbe9b0e3c440067d8130caa886f5d5ab0eb015251ea4f78fd08882a42"),
    ("confirm", "php", "code", "php-symfony-console", "5.4.53+dfsg-0+deb12u1", ["usr/share/php/**/*.php"], "833785c3b9774c84036797c6d9513b9647ecdd7a60ecc8da7670265f86d753a1"),
    ("confirm", "mime", "markup", "shared-mime-info", "2.2-1", ["usr/share/mime/packages/freedesktop.org.xml"], "d5826a6325c2602981d53a341543f174a8fde073196c1c750cb8578552f4fff4"),
    ("confirm", "usb", "tables", "usb.ids", "2025.07.26-0+deb12u1", ["var/lib/usbutils/usb.ids"], "817574e605696ff67c59b20933f0818604b7ef72ea795a65f80bb8d0d2e72489"),
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
